// The tools of the disk tier: survey, verify, purge. They open the directory by its path and answer with dicts, lists, ints and strings.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <exception>
#include <limits>
#include <stdexcept>

#include "bind.hpp"
#include "disk_posix.hpp"
#include "purge.hpp"
#include "ring.hpp"
#include "survey.hpp"
#include "verifier.hpp"

namespace {

std::shared_ptr<Disk> open_existing(const std::string& path) {
    std::string error;
    auto disk = PosixDisk::open_existing(path, error);
    if (!disk) throw std::runtime_error(error);
    return disk;
}

// Runs one of the tools without the interpreter lock. What the progress function raises ends the tool, and is raised by this.
template <class Tool>
auto with_progress(const nb::object& function, Tool tool) {
    std::exception_ptr raised;
    const Progress progress = [&](std::uint64_t done, std::uint64_t total) {
        if (function.is_none()) return true;
        const nb::gil_scoped_acquire acquire;
        try {
            return nb::cast<bool>(function(done, total));
        } catch (...) {
            raised = std::current_exception();
            return false;
        }
    };
    auto result = [&] {
        const nb::gil_scoped_release release;
        return tool(progress);
    }();
    if (raised) std::rethrow_exception(raised);
    return result;
}

void refuse(const std::string& path, int error) {
    if (error != 0) throw std::runtime_error("disk_path " + path + ": cannot be used: " + std::strerror(-error));
}

// A sentence's end, or None where there is no error.
nb::object error_text(int error) { return error == 0 ? nb::object(nb::none()) : nb::object(nb::str(std::strerror(-error))); }

const char* state_name(HeaderState state) {
    static constexpr const char* names[] = {"sound", "unknown", "damaged", "foreign"};
    return names[static_cast<int>(state)];
}

const char* state_name(SlotState state) {
    static constexpr const char* names[] = {"sound",   "bad header",     "header of another page",
                                            "bad row", "file too short", "unreadable"};
    return names[static_cast<int>(state)];
}

nb::dict dict_of(const SegmentSurvey& segment) {
    nb::dict out;
    out["name"] = segment.name;
    out["state"] = state_name(segment.state);
    out["version"] = segment.version;
    out["error"] = error_text(segment.error);
    out["bytes"] = segment.bytes;
    out["allocated"] = segment.allocated;
    out["page_size"] = segment.shape.page_size;
    out["planes"] = segment.shape.plane_count;
    out["row_bytes"] = segment.shape.row_bytes;
    out["slots"] = segment.slots;
    out["pages"] = segment.pages;
    out["damaged_records"] = segment.damaged_records;
    out["cut_pages"] = segment.cut_pages;
    out["last_use"] = segment.last_use;
    return out;
}

nb::dict dict_of(const Survey& all, const Disk& disk) {
    nb::list shelves, unknown;
    for (const ShelfSurvey& shelf : all.shelves) {
        nb::list segments;
        for (const SegmentSurvey& segment : shelf.segments) segments.append(dict_of(segment));
        nb::dict one;
        one["id"] = shelf.id;
        one["alive"] = shelf.alive;
        one["error"] = error_text(shelf.error);
        one["segments"] = segments;
        shelves.append(one);
    }
    for (const UnknownFile& file : all.unknown) {
        nb::dict one;
        one["path"] = file.path;
        one["allocated"] = file.bytes;
        unknown.append(one);
    }
    nb::dict spaces;
    for (const auto& [key, space] : all.spaces) {
        nb::dict one;
        one["page_size"] = space.page_size;
        one["pages"] = space.pages;
        one["bytes"] = space.bytes;
        one["uses"] = space.uses;
        one["oldest_use"] = space.first_use;
        one["last_use"] = space.last_use;
        spaces[hex(key).c_str()] = one;
    }
    nb::list descriptions;
    for (const std::string& name : all.descriptions) descriptions.append(name);
    nb::dict out;
    out["path"] = disk.where();
    out["allocated"] = all.allocated;
    out["free"] = all.free;
    out["shelves"] = shelves;
    out["namespaces"] = spaces;
    out["descriptions"] = descriptions;
    out["unknown"] = unknown;
    return out;
}

nb::dict dict_of(const SegmentProof& segment) {
    nb::list bad;
    for (const BadPage& page : segment.bad) {
        nb::dict one;
        one["slot"] = page.slot;
        one["what"] = state_name(page.state);
        one["error"] = error_text(page.error);
        one["namespace"] = hex(page.space);
        one["key"] = hex(page.key);
        bad.append(one);
    }
    nb::dict out;
    out["name"] = segment.name;
    out["state"] = state_name(segment.state);
    out["version"] = segment.version;
    out["error"] = error_text(segment.error);
    out["left"] = segment.left();
    out["has_slots"] = segment.has_slots;
    out["sound"] = segment.sound;
    out["corrupt"] = segment.corrupt;
    out["torn"] = segment.torn;
    out["unreadable"] = segment.unreadable;
    out["damaged_records"] = segment.damaged_records;
    out["changed"] = segment.changed;
    out["dropped"] = segment.dropped;
    out["recovered"] = segment.recovered;
    out["rebuilt"] = segment.rebuilt;
    out["removed"] = segment.removed;
    out["bad"] = bad;
    return out;
}

nb::dict dict_of(const Verification& proof) {
    nb::list shelves;
    for (const ShelfProof& shelf : proof.shelves) {
        nb::list segments;
        for (const SegmentProof& segment : shelf.segments) segments.append(dict_of(segment));
        nb::dict one;
        one["id"] = shelf.id;
        one["alive"] = shelf.alive;
        one["error"] = error_text(shelf.error);
        one["segments"] = segments;
        shelves.append(one);
    }
    nb::dict out;
    out["bytes"] = proof.bytes;
    out["cancelled"] = proof.cancelled;
    out["shelves"] = shelves;
    return out;
}

nb::dict run_survey(const std::string& path) {
    std::shared_ptr<Disk> disk;
    Survey all;
    {
        const nb::gil_scoped_release release;
        disk = open_existing(path);
        all = survey(disk);
    }
    refuse(path, all.error);
    return dict_of(all, *disk);
}

nb::dict run_verify(const std::string& path, bool repair, const nb::object& progress) {
    const Verification proof =
        with_progress(progress, [&](const Progress& report) { return verify(open_existing(path), repair, report); });
    refuse(path, proof.error);
    return dict_of(proof);
}

nb::dict run_purge(const std::string& path, bool all, const nb::object& spaces, const nb::object& before,
                   const nb::object& to_bytes, const nb::object& prefixes, const std::vector<std::string>& ours, double patience,
                   const nb::object& progress, const nb::object& meanwhile) {
    const PurgeOrder order = order_of(all, spaces, before, to_bytes, prefixes);
    const std::chrono::milliseconds wait(std::int64_t(std::clamp(patience, 0.0, 86400.0) * 1000));
    std::exception_ptr raised;
    std::function<void()> call;
    if (!meanwhile.is_none()) {
        call = [&] {
            const nb::gil_scoped_acquire acquire;
            try {
                meanwhile();
            } catch (...) {
                raised = std::current_exception();
            }
        };
    }
    const PurgeReport report =
        with_progress(progress, [&](const Progress& told) { return purge(open_existing(path), order, told, ours, wait, call); });
    if (raised) std::rethrow_exception(raised);
    return ::dict_of(report);
}

}  // namespace

PurgeOrder order_of(bool all, const nb::object& spaces, const nb::object& before, const nb::object& to_bytes,
                    const nb::object& prefixes) {
    if (int(all) + int(!spaces.is_none()) + int(!before.is_none()) + int(!to_bytes.is_none()) + int(!prefixes.is_none()) != 1)
        throw nb::value_error("name one of all, spaces, before, to_bytes and prefixes");
    PurgeOrder order;
    const auto take_keys = [&](const nb::object& keys, const char* what) {
        for (nb::handle key : keys) order.keys.insert(key_of(nb::cast<nb::bytes>(key), what));
    };
    if (!spaces.is_none()) {
        order.kind = PurgeOrder::Kind::spaces;
        take_keys(spaces, "a namespace");
    } else if (!before.is_none()) {
        constexpr double kLast = std::numeric_limits<std::uint32_t>::max();
        order.kind = PurgeOrder::Kind::unused;
        order.before = static_cast<std::uint32_t>(std::clamp(nb::cast<double>(before), 0.0, kLast));
    } else if (!to_bytes.is_none()) {
        order.kind = PurgeOrder::Kind::to_size;
        order.bytes = nb::cast<std::uint64_t>(to_bytes);
    } else if (!prefixes.is_none()) {
        order.kind = PurgeOrder::Kind::prefix;
        take_keys(prefixes, "a page key");
    }
    return order;
}

nb::dict dict_of(const PurgeReport& report) {
    nb::dict out;
    const std::pair<const char*, std::uint64_t> counts[] = {
        {"pages", report.pages},           {"bytes", report.bytes},
        {"leftovers", report.leftovers},   {"segments", report.segments},
        {"freed", report.freed},           {"namespaces", report.namespaces},
        {"allocated", report.allocated},   {"used_shelves", report.used_shelves},
        {"used_pages", report.used_pages}, {"used_bytes", report.used_bytes},
        {"unanswered", report.unanswered}, {"unknown", report.unknown},
        {"failures", report.failures},
    };
    for (const auto& [name, value] : counts) out[name] = value;
    const char* cause =
        report.error == -EWOULDBLOCK ? "in use by another purge or by a process that starts" : std::strerror(-report.error);
    out["error"] = report.failures == 0 ? nb::object(nb::none()) : nb::object(nb::str((report.where + ": " + cause).c_str()));
    out["cancelled"] = report.cancelled;
    return out;
}

void bind_disk(nb::module_& module) {
    module.def(
        "survey", &run_survey, "path"_a,
        "What a cache directory holds, by its tables: see kvstrata.survey. Reads only. Raises RuntimeError with one sentence.");
    module.def(
        "abilities",
        [](const std::string& path, bool group) {
            std::string error;
            std::shared_ptr<Disk> disk;
            bool ring = false;
            {
                const nb::gil_scoped_release release;
                disk = PosixDisk::open_root(path, error, group, std::chrono::milliseconds{1000});
                ring = Ring::open() != nullptr;
            }
            if (!disk) throw std::runtime_error(error);
            return nb::make_tuple(disk->direct(), ring);
        },
        "path"_a, "group"_a = false,
        "(whether files there can be used with O_DIRECT, whether io_uring is allowed). Makes the directory where it is missing, "
        "and says\n"
        "what a cache would say of it: raises RuntimeError with one sentence, within a second.");
    module.def("verify", &run_verify, "path"_a, nb::kw_only(), "repair"_a = false, "progress"_a = nb::none(),
               "Reads and proves every page. progress(bytes done, bytes in all), called often, returns False to cancel. Raises\n"
               "RuntimeError with one sentence.");
    module.def(
        "present",
        [](const std::string& path, const std::vector<nb::bytes>& keys) {
            std::set<Key, KeyOrder> wanted;
            for (const nb::bytes& key : keys) wanted.insert(key_of(key, "a page key"));
            {
                const nb::gil_scoped_release release;
                const auto disk = open_existing(path);
                wanted = pages_among(disk, survey(disk), wanted);
            }
            nb::set found;
            for (const Key& key : wanted) found.add(bytes_of(key));
            return found;
        },
        "path"_a, "keys"_a, "Those of the page keys that the directory's tables name. Raises RuntimeError.");
    module.def(
        "pages_after",
        [](const std::string& path, const std::vector<nb::bytes>& keys, std::size_t most) {
            std::set<Key, KeyOrder> wanted;
            for (const nb::bytes& key : keys) wanted.insert(key_of(key, "a page key"));
            std::vector<NextPage> found;
            {
                const nb::gil_scoped_release release;
                const auto disk = open_existing(path);
                found = pages_after(disk, survey(disk), wanted, most);
            }
            nb::list pages;
            for (const NextPage& page : found) pages.append(nb::make_tuple(bytes_of(page.above), array_of(page.tokens)));
            return pages;
        },
        "path"_a, "keys"_a, "most"_a,
        "(key, tokens) of pages in the directory that continue one of these keys, or begin one of these namespaces; `most` at "
        "most. Raises RuntimeError.");
    module.def(
        "continuations",
        [](const std::string& path, const std::vector<nb::bytes>& keys) {
            PurgeOrder order;
            order.kind = PurgeOrder::Kind::prefix;
            for (const nb::bytes& key : keys) order.keys.insert(key_of(key, "a page key"));
            {
                const nb::gil_scoped_release release;
                const auto disk = open_existing(path);
                add_continuations(disk, survey(disk, std::chrono::milliseconds{100}), order);
            }
            std::vector<nb::bytes> all;
            for (const Key& key : order.keys) all.push_back(bytes_of(key));
            return all;
        },
        "path"_a, "keys"_a, "The keys of these pages and of all in the directory that continue them. Raises RuntimeError.");
    module.def(
        "purge", &run_purge, "path"_a, nb::kw_only(), "all"_a = false, "spaces"_a = nb::none(), "before"_a = nb::none(),
        "to_bytes"_a = nb::none(), "prefixes"_a = nb::none(), "ours"_a = std::vector<std::string>{}, "patience"_a = 10.0,
        "progress"_a = nb::none(), "meanwhile"_a = nb::none(),
        "Drops pages: all, those of the namespaces `spaces` (32 bytes each), those not used since `before` (seconds since "
        "1970), the pages with\n"
        "the keys `prefixes` and all that continue them, or whole segments until the directory takes at most to_bytes.\n"
        "Owners that live, but for the shelves `ours`, are asked to do it, and others who purge are waited for: `patience` "
        "seconds in all.\n"
        "progress(slots done, slots in all) returns False to cancel. meanwhile() is called when the others have been asked.");
}
