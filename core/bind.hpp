// What the files of the binding share: Python's arrays to the core's types and back.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <string>
#include <vector>

#include "driver.hpp"
#include "purge.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace kvstrata;

using Ints = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Longs = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using IntArray = nb::ndarray<nb::numpy, std::int32_t, nb::ndim<1>>;

inline std::span<const std::int32_t> view(const Ints& array) { return {array.data(), array.size()}; }

inline IntArray array_of(const std::vector<Row>& values) {
    auto* copy = new std::vector<Row>(values);  // owned by the capsule
    nb::capsule owner(copy, [](void* p) noexcept { delete static_cast<std::vector<Row>*>(p); });
    return IntArray(copy->data(), {copy->size()}, owner);
}

inline Key key_of(const nb::bytes& bytes, const char* what) {
    Key key;
    if (bytes.size() != key.bytes.size())
        throw nb::value_error((std::string(what) + " has " + std::to_string(bytes.size()) + " bytes; it must have 32").c_str());
    std::memcpy(key.bytes.data(), bytes.c_str(), key.bytes.size());
    return key;
}

inline nb::bytes bytes_of(const Key& key) { return nb::bytes(reinterpret_cast<const char*>(key.bytes.data()), key.bytes.size()); }

inline const char* tier_name(Tier tier) { return tier == Tier::gpu ? "gpu" : tier == Tier::cpu ? "cpu" : "disk"; }

// bind_shared.cpp
std::vector<MediaSpan> media_of(const Longs& offsets, const Longs& lengths, const nb::bytes& digests);
LeaseRequest request_of(const nb::bytes& space, const Ints& tokens, const std::vector<MediaSpan>& media, std::uint64_t reserve,
                        std::uint32_t leave, std::uint32_t multiple, bool read, bool write, bool load);
nb::list events_of(const std::vector<Event>& events);

// What a call tells is read first and made Python objects of afterwards, without the runtime's lock: making objects may run the garbage
// collector, which may release a forgotten lease.
struct LeaseReport {
    LeaseAnswer answer;
    std::uint32_t matched = 0;
};
struct StateReport {
    bool settled = true;
    std::uint32_t hit = 0;
    bool rows_lost = false;
    std::array<std::uint32_t, kTiers> sources{};
};
struct Counter {
    const char* tier;  // nullptr: of all
    const char* name;
    std::uint64_t value;
};
LeaseReport report_of(const Driver& driver, const LeaseAnswer& answer);
StateReport state_of(const Driver& driver, LeaseId id);
std::vector<Counter> stats_of(const Driver& driver);
nb::tuple tuple_of(const LeaseReport& report);  // (id, never, rows needed, rows available, pages matched)
nb::tuple tuple_of(const StateReport& report);  // (settled, pages of the hit now, rows lost, (pages from gpu, cpu, disk))
nb::dict dict_of(const std::vector<Counter>& counters);

// bind_driver.cpp
void bind_driver(nb::module_& module);

// bind_disk.cpp
PurgeOrder order_of(bool all, const nb::object& spaces, const nb::object& before, const nb::object& to_bytes,
                    const nb::object& prefixes);  // one of them
nb::dict dict_of(const PurgeReport& report);
void bind_disk(nb::module_& module);

// bind_core.cpp
void bind_core(nb::module_& module);
