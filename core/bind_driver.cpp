// The driver as it is, without threads, clock or I/O: for tests against a naive model and for the simulator. Time and completions are the
// caller's. What the runtime does with a Driver (runtime.cpp) is all that is missing here.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "bind.hpp"

namespace {

std::unique_ptr<Driver> make_driver(std::uint32_t page_size, std::uint32_t gpu_rows, std::uint32_t cpu_rows, bool disk,
                                    std::size_t events, std::uint32_t copy_rows, std::uint32_t reads_at_once,
                                    std::uint32_t writes_at_once, double read_deadline, double write_deadline, double copy_deadline,
                                    double retry_after, std::size_t key_bytes) {
    if (key_bytes < 1 || key_bytes > sizeof(Key)) throw nb::value_error("key_bytes must be 1 to 32");
    DriverConfig config;
    config.ledger = {
        .page_size = page_size, .gpu_rows = gpu_rows, .first_gpu_row = 1, .cpu_rows = cpu_rows, .event_capacity = events};
    config.disk = disk;
    config.copy_rows = copy_rows;
    config.reads_at_once = reads_at_once;
    config.writes_at_once = writes_at_once;
    config.read_deadline = read_deadline;
    config.write_deadline = write_deadline;
    config.copy_deadline = copy_deadline;
    config.retry_after = retry_after;
    config.key_bytes = key_bytes;
    return std::make_unique<Driver>(config, make_lru());
}

using Slot = std::pair<std::uint32_t, std::uint32_t>;
SlotRef slot_of(const Slot& slot) { return {slot.first, slot.second}; }

OpStatus status_of(const std::string& name) {
    const std::pair<const char*, OpStatus> names[] = {
        {"ok", OpStatus::ok},        {"corrupt", OpStatus::corrupt},       {"conflict", OpStatus::conflict},
        {"stale", OpStatus::stale},  {"unreadable", OpStatus::unreadable}, {"full", OpStatus::full},
        {"failed", OpStatus::failed}};
    for (const auto& [known, status] : names)
        if (name == known) return status;
    throw nb::value_error(("status '" + name + "' is none of ok, corrupt, conflict, stale, unreadable, full, failed").c_str());
}

// completions: [(id, status, [(segment, slot)])] -> ([(id, kind, (segment, slot), slab row, key)], [(ticket, up, slab, device, fence)])
nb::tuple step(Driver& driver, double now, const nb::list& completions) {
    std::vector<Completion> done;
    for (nb::handle item : completions) {
        const auto parts = nb::cast<nb::tuple>(item);
        Completion& one = done.emplace_back();
        one.id = nb::cast<std::uint64_t>(parts[0]);
        one.status = status_of(nb::cast<std::string>(parts[1]));
        for (const Slot& slot : nb::cast<std::vector<Slot>>(parts[2])) one.slots.push_back(slot_of(slot));
    }
    const Submissions next = driver.step(now, done);
    static const char* kinds[] = {"read", "write", "clear", "grow"};
    nb::list ops, copies;
    for (const Op& op : next.ops)
        ops.append(nb::make_tuple(op.id, kinds[static_cast<int>(op.kind)], nb::make_tuple(op.slot.segment, op.slot.slot), op.row,
                                  bytes_of(op.page.key)));
    for (const CopyBatch& batch : next.copies)
        copies.append(nb::make_tuple(batch.ticket, batch.up, array_of(batch.slab), array_of(batch.device), batch.fence));
    return nb::make_tuple(ops, copies);
}

// Per page of the tokens that the forest knows: (gpu, cpu, disk), each 0 no copy, 1 on its way, 2 there.
nb::list where(Driver& driver, const nb::bytes& space, const Ints& tokens) {
    const Forest& forest = driver.ledger().forest();
    nb::list out;
    PageId page = driver.ledger().root(key_of(space, "the namespace"));
    const PageId root = page;
    for (std::size_t at = 0; at + forest.page_size() <= tokens.size(); at += forest.page_size()) {
        page = forest.child(page, {view(tokens).subspan(at, forest.page_size()), {}});
        if (page == kNoPage) break;
        const PageRecord& record = forest.at(page);
        const int disk = record.entry == kNoEntry ? 0 : driver.ledger().index().at(record.entry).writing ? 1 : 2;
        out.append(nb::make_tuple(static_cast<int>(record.state[0]), static_cast<int>(record.state[1]), disk));
    }
    driver.ledger().retire(root);
    return out;
}

}  // namespace

void bind_driver(nb::module_& module) {
    nb::class_<Driver>(
        module, "Driver",
        "The state machine under a cache, driven by hand: no threads, no clock, no I/O. Rows and pages are int32 arrays; `now` is\n"
        "in seconds and never goes back. Not thread-safe.")
        .def(nb::new_(&make_driver), nb::kw_only(), "page_size"_a, "gpu_rows"_a, "cpu_rows"_a = 0, "disk"_a = false, "events"_a = 0,
             "copy_rows"_a = 64, "reads_at_once"_a = 8, "writes_at_once"_a = 4, "read_deadline"_a = 5.0, "write_deadline"_a = 30.0,
             "copy_deadline"_a = 30.0, "retry_after"_a = 5.0, "key_bytes"_a = 32)
        .def(
            "lease",
            [](Driver& driver, double now, const nb::bytes& space, const Ints& tokens, std::uint64_t reserve, std::uint32_t leave,
               std::uint32_t multiple, bool read, bool write, bool load) {
                return tuple_of(report_of(
                    driver, driver.lease(now, request_of(space, tokens, {}, reserve, leave, multiple, read, write, load))));
            },
            "now"_a, nb::kw_only(), "space"_a, "tokens"_a, "reserve"_a = 0, "leave"_a = 1, "multiple"_a = 0, "read"_a = true,
            "write"_a = true, "load"_a = true, "(id, never, rows needed, rows available, pages matched); id 0: the pool is full.")
        .def(
            "state", [](const Driver& driver, LeaseId id) { return tuple_of(state_of(driver, id)); }, "id"_a,
            "(settled, pages of the hit, rows lost, (pages from gpu, cpu, disk)).")
        .def(
            "rows", [](const Driver& d, LeaseId id) { return array_of(d.find(id) ? d.find(id)->rows : std::vector<Row>{}); },
            "id"_a)
        .def(
            "append", [](Driver& d, LeaseId id, const Ints& tokens) { d.append(id, view(tokens)); }, "id"_a, "tokens"_a)
        .def("grow", &Driver::grow, "now"_a, "id"_a, "tokens"_a)
        .def("settle", &Driver::settle, "now"_a, "id"_a)
        .def("publish", &Driver::publish, "now"_a, "id"_a, "tokens"_a, "ready"_a = 0)
        .def("release", &Driver::release, "now"_a, "id"_a, "fence"_a = 0)
        .def(
            "load",
            [](Driver& d, double now, LeaseId id, std::uint32_t first, const Ints& blocks) {
                return d.load(now, id, first, view(blocks));
            },
            "now"_a, "id"_a, "first_page"_a, "blocks"_a)
        .def(
            "save",
            [](Driver& d, double now, LeaseId id, std::uint32_t first, const Ints& blocks, Fence ready) {
                return d.save(now, id, first, view(blocks), ready);
            },
            "now"_a, "id"_a, "first_page"_a, "blocks"_a, "ready"_a = 0)
        .def("step", &step, "now"_a, "completions"_a,
             "Takes [(id, status, [(segment, slot), ...])] and returns ([(id, kind, (segment, slot), slab row, key)], [(ticket, "
             "up, slab rows,\n"
             "device rows, fence)]): what to start.")
        .def("copied", &Driver::copied, "now"_a, "ticket"_a, "ok"_a)
        .def("next_deadline", &Driver::next_deadline)
        .def("idle", &Driver::idle)
        .def(
            "add_slot", [](Driver& d, Slot slot) { d.add_slot(slot_of(slot)); }, "slot"_a)
        .def(
            "add_found",
            [](Driver& d, const nb::bytes& key, const nb::bytes& parent, Slot slot) {
                d.add_found(key_of(key, "the key"), key_of(parent, "the parent key"), slot_of(slot));
            },
            "key"_a, "parent"_a, "slot"_a)
        .def(
            "add_shared",
            [](Driver& d, const nb::bytes& key, const nb::bytes& parent, Slot slot, bool first) {
                d.add_shared(key_of(key, "the key"), key_of(parent, "the parent key"), slot_of(slot), first);
            },
            "key"_a, "parent"_a, "slot"_a, "first"_a = false,
            "A page in another process's slot; first: where both have it, theirs is kept.")
        .def(
            "slot_gone", [](Driver& d, Slot slot) { d.slot_gone(slot_of(slot)); }, "slot"_a,
            "Another process's slot holds something else by now.")
        .def("adopt_segment", &Driver::adopt_segment, "segment"_a, "Another process's segment is ours now.")
        .def("retire_segment", &Driver::retire_segment, "segment"_a, "Its file is gone: no slot of it is used any more.")
        .def("where", &where, "space"_a, "tokens"_a,
             "Per known page of the tokens: (gpu, cpu, disk), each 0 no copy, 1 on its way, 2 there.")
        .def("stats", [](const Driver& driver) { return dict_of(stats_of(driver)); })
        .def("events", [](Driver& d) { return events_of(d.ledger().drain_events()); })
        .def("check_integrity", [](const Driver& d) {
            std::string fault;
            d.check_integrity(fault);
            return fault;
        });
}
