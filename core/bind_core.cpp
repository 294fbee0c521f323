// The class Core of the binding: one cache. See bind.cpp.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <stdexcept>

#include "bind.hpp"
#include "runtime.hpp"

namespace {

// The runtime, and the process it lives in: after a fork its threads and locks are gone, so the child is refused.
class Core {
   public:
    explicit Core(RuntimeConfig config) : pid_(getpid()) {
        std::string error;
        {
            nb::gil_scoped_release release;
            runtime_ = Runtime::open(std::move(config), error);
        }
        if (!runtime_) throw std::runtime_error(error);
    }
    ~Core() {
        if (getpid() != pid_) runtime_.release();  // the child of a fork must not touch the parent's threads and files
    }

    Runtime& use() const {
        if (getpid() != pid_)
            throw std::runtime_error("this cache belongs to process " + std::to_string(pid_) +
                                     ": a forked child cannot use it; open a new PrefixCache there (it shares disk_path)");
        return *runtime_;
    }

   private:
    pid_t pid_;
    std::unique_ptr<Runtime> runtime_;
};

// The id is set as into._id before this returns: no signal comes between, so that a lease always has an owner.
nb::tuple lease(Core& core, nb::object into, const nb::bytes& space, const Ints& tokens, std::uint64_t reserve, std::uint32_t leave,
                std::uint32_t multiple, bool read, bool write, bool load, const Longs& media_offsets, const Longs& media_lengths,
                const nb::bytes& media_digests) {
    const std::vector<MediaSpan> media = media_of(media_offsets, media_lengths, media_digests);
    if (core.use().closed()) throw std::runtime_error("this cache is closed; open another one");
    const LeaseRequest request = request_of(space, tokens, media, reserve, leave, multiple, read, write, load);
    const LeaseReport report =
        core.use().decide([&](Driver& driver, double now) { return report_of(driver, driver.lease(now, request)); });
    into.attr("_id") = report.answer.id;
    return tuple_of(report);
}

nb::tuple lease_state(Core& core, LeaseId id) {
    return tuple_of(core.use().look([&](const Driver& driver) { return state_of(driver, id); }));
}

nb::list events(Core& core) {
    return events_of(core.use().decide([](Driver& driver, double) { return driver.ledger().drain_events(); }));
}

// What only the disk tier has: see docs/stats.md.
void add_disk_stats(nb::dict disk, const Runtime& runtime, const DiskHealth& health) {
    const ShelfStats shelf = runtime.shelf()->stats();
    const IoStats io = runtime.io_stats();
    const std::pair<const char*, std::uint64_t> counts[] = {
        {"bytes", runtime.shelf()->allocated_bytes()},
        {"adopted_pages", runtime.adopted_pages()},
        {"adopted_shelves", shelf.adopted_shelves},
        {"owners", shelf.owners},
        {"cap_bytes", shelf.cap_bytes},
        {"unacknowledged", shelf.unacknowledged},
        {"segments", shelf.segments},
        {"other_segments", shelf.other_segments},
        {"removed_segments", shelf.removed_segments},
        {"vanished_segments", shelf.vanished_segments},
        {"unknown_files", shelf.unknown_files},
        {"damaged_segments", shelf.damaged_segments},
        {"damaged_records", shelf.damaged_records},
        {"unproven_slots", shelf.unproven_slots},
        {"rebuilt_pages", shelf.rebuilt_pages},
        {"read_requests", io.read_requests},
        {"read_pages", io.read_pages},
        {"read_bytes", io.read_bytes},
        {"write_requests", io.write_requests},
        {"write_pages", io.write_pages},
        {"write_bytes", io.write_bytes},
        {"hanging", io.hanging},
        {"replaced_threads", io.replaced},
    };
    for (const auto& [name, value] : counts) disk[name] = value;
    disk["direct"] = shelf.direct;
    disk["io_uring"] = io.ring;
    disk["health"] = health.sentence();
    disk["health_since"] = health.since();
}

nb::dict stats(Core& core) {
    Runtime& runtime = core.use();
    DiskHealth health;
    nb::dict out = dict_of(runtime.look([&](const Driver& driver) {
        health = driver.health();
        return stats_of(driver);
    }));
    if (runtime.shelf()) add_disk_stats(nb::cast<nb::dict>(out["disk"]), runtime, health);
    out["disk_bytes"] = runtime.shelf() ? runtime.shelf()->allocated_bytes() : 0;
    return out;
}

// {pages dropped and so on, as purge(); gpu, cpu, in_use: copies in memory}
nb::dict purge_own(Core& core, bool all, const nb::object& spaces, const nb::object& before, const nb::object& prefixes,
                   double seconds) {
    const PurgeOrder order = order_of(all, spaces, before, nb::none(), prefixes);
    PurgeReport report;
    MemoryDrops drops;
    {
        nb::gil_scoped_release release;
        drops = core.use().purge(order, seconds, report);
    }
    nb::dict out = dict_of(report);
    out["gpu"] = drops.gpu;
    out["cpu"] = drops.cpu;
    out["in_use"] = drops.in_use;
    return out;
}

nb::tuple wait_health(Core& core, std::uint64_t seen, double seconds) {
    DiskHealth health;
    bool closed = false;
    {
        const nb::gil_scoped_release release;
        Runtime& runtime = core.use();
        runtime.wait_health(seen, seconds);
        closed = runtime.closed();
        health = runtime.look([](const Driver& driver) { return driver.health(); });
    }
    return nb::make_tuple(health.changes(), health.sentence(), health.since(), closed);
}

std::unique_ptr<Core> open_core(std::uint32_t page_size, std::uint64_t row_bytes, std::uint64_t row_stride,
                                const std::vector<std::pair<std::uint64_t, std::uint64_t>>& planes, std::uint32_t gpu_rows,
                                std::uint32_t cpu_rows, const std::string& disk_path, bool disk_group, std::uint64_t disk_bytes,
                                std::uint64_t disk_reserve_bytes, const nb::bytes& space, const std::string& space_json,
                                unsigned io_threads, double load_deadline, double write_deadline, double retry_after,
                                double look_every, std::size_t events, std::uint32_t copy_rows, bool shared_slab, bool poison,
                                std::size_t key_bytes) {
    if (key_bytes < 1 || key_bytes > sizeof(Key)) throw nb::value_error("key_bytes must be 1 to 32");
    RuntimeConfig config;
    DriverConfig& driver = config.driver;
    driver.ledger = {.page_size = page_size,
                     .gpu_rows = gpu_rows,
                     .first_gpu_row = 1,
                     .cpu_rows = cpu_rows,
                     .event_capacity = events,
                     .log_freed = poison};
    driver.copy_rows = copy_rows;
    driver.read_deadline = load_deadline;
    driver.write_deadline = write_deadline;
    driver.retry_after = retry_after;
    driver.key_bytes = key_bytes;
    config.row_stride = row_stride;
    config.shared_slab = shared_slab;
    config.poison = poison;
    config.disk_path = disk_path;
    config.disk_group = disk_group;
    config.io_threads = io_threads;
    config.look_every = look_every;
    config.shelf = {.page_size = page_size,
                    .row_bytes = row_bytes,
                    .row_stride = row_stride,
                    .planes = {},
                    .cap_bytes = disk_bytes,
                    .reserve_free_bytes = disk_reserve_bytes,
                    .space = key_of(space, "the namespace"),
                    .space_json = space_json};
    for (const auto& [offset, bytes] : planes) config.shelf.planes.push_back({offset, bytes});
    return std::make_unique<Core>(std::move(config));
}

}  // namespace

void bind_core(nb::module_& module) {
    nb::class_<Core>(module, "Core", "Ledger, slab, shelf and threads of one cache. Thread-safe. Rows and pages are int32 arrays.")
        .def(
            nb::new_(&open_core), nb::kw_only(), "page_size"_a, "row_bytes"_a, "row_stride"_a, "planes"_a, "gpu_rows"_a,
            "cpu_rows"_a, "disk_path"_a, "disk_group"_a, "disk_bytes"_a, "disk_reserve_bytes"_a, "space"_a, "space_json"_a,
            "io_threads"_a = 4, "load_deadline"_a = 5.0, "write_deadline"_a = 30.0, "retry_after"_a = 5.0, "look_every"_a = 5.0,
            "events"_a = 0, "copy_rows"_a = 64, "shared_slab"_a = false, "poison"_a = false, "key_bytes"_a = 32,
            "gpu_rows: rows of the device pool without its scratch row 0; 0: guest mode. cpu_rows 0: no CPU tier. disk_path '': no "
            "disk\n"
            "tier. planes: (offset, bytes) pairs that cover a row. Sizes in bytes, times in seconds. key_bytes: for tests, of page "
            "keys that count.\n"
            "Raises RuntimeError with one sentence.")
        .def("lease", &lease, nb::kw_only(), "into"_a, "space"_a, "tokens"_a, "reserve"_a, "leave"_a, "multiple"_a, "read"_a,
             "write"_a, "load"_a, "media_offsets"_a, "media_lengths"_a, "media_digests"_a,
             "(id, never, rows needed, rows available, pages matched); id 0: the pool is full.")
        .def("state", &lease_state, "id"_a, "(settled, pages of the hit, rows lost, (pages from gpu, cpu, disk)).")
        .def(
            "rows",
            [](Core& core, LeaseId id) {
                return array_of(core.use().look([&](const Driver& driver) {
                    const Lease* held = driver.find(id);
                    return held ? held->rows : std::vector<Row>{};
                }));
            },
            "id"_a, "The device row of every page of the lease.")
        .def(
            "slab_rows",
            [](Core& core, LeaseId id) {
                return array_of(core.use().look([&](const Driver& driver) {
                    std::vector<Row> rows;
                    if (const Lease* held = driver.find(id))
                        for (std::uint32_t i = 0; i < held->hit; ++i)
                            rows.push_back(driver.ledger().forest().at(held->path[i]).row[1]);
                    return rows;
                }));
            },
            "id"_a, "Guest mode: the slab row of every page of the hit; valid while the lease is held.")
        .def(
            "wait",
            [](Core& core, LeaseId id, double seconds) {
                nb::gil_scoped_release release;
                return core.use().wait(
                    [id](const Driver& driver) {
                        const Lease* held = driver.find(id);
                        return !held || held->settled;
                    },
                    seconds);
            },
            "id"_a, "seconds"_a, "Waits until the lease is settled; False after `seconds`.")
        .def(
            "settle", [](Core& core, LeaseId id) { core.use().decide([&](Driver& d, double now) { d.settle(now, id); }); }, "id"_a,
            "Gives up what is not on its way to the device yet: the hit becomes shorter.")
        .def(
            "append",
            [](Core& core, LeaseId id, const Ints& tokens) {
                core.use().decide([&](Driver& d, double) { d.append(id, view(tokens)); });
            },
            "id"_a, "tokens"_a)
        .def(
            "grow",
            [](Core& core, LeaseId id, std::uint64_t tokens) {
                return core.use().decide([&](Driver& d, double now) { return d.grow(now, id, tokens); });
            },
            "id"_a, "tokens"_a)
        .def(
            "publish",
            [](Core& core, LeaseId id, std::uint64_t tokens, Fence ready) {
                return core.use().decide([&](Driver& d, double now) { return d.publish(now, id, tokens, ready); });
            },
            "id"_a, "tokens"_a, "ready"_a, "Pages on the lease's path afterwards.")
        .def(
            "release",
            [](Core& core, LeaseId id, Fence fence) {
                core.use().decide([&](Driver& d, double now) { d.release(now, id, fence); });
            },
            "id"_a, "fence"_a)
        .def(
            "load",
            [](Core& core, LeaseId id, std::uint32_t first_page, const Ints& blocks) {
                return core.use().decide([&](Driver& d, double now) { return d.load(now, id, first_page, view(blocks)); });
            },
            "id"_a, "first_page"_a, "blocks"_a,
            "Guest mode: a ticket for the copy of pages [first_page, ...) of the hit into device blocks; 0: none.")
        .def(
            "save",
            [](Core& core, LeaseId id, std::uint32_t first_page, const Ints& blocks, Fence ready) {
                return core.use().decide([&](Driver& d, double now) { return d.save(now, id, first_page, view(blocks), ready); });
            },
            "id"_a, "first_page"_a, "blocks"_a, "ready"_a,
            "Guest mode: a ticket for the copy of device blocks into the CPU tier; 0: nothing to save.")
        .def(
            "wait_copy",
            [](Core& core, std::uint64_t ticket, double seconds) {
                nb::gil_scoped_release release;
                return core.use().wait([ticket](const Driver& driver) { return !driver.copying(ticket); }, seconds);
            },
            "ticket"_a, "seconds"_a)
        .def(
            "put",
            [](Core& core, const nb::bytes& space, const Ints& tokens, std::uint32_t first) {
                const Key key = key_of(space, "the namespace");
                if (core.use().closed()) throw std::runtime_error("this cache is closed; open another one");
                const RawRows put = core.use().decide([&](Driver& d, double now) { return d.put(now, key, view(tokens), first); });
                return nb::make_tuple(put.ticket, array_of(put.pages), array_of(put.rows), put.next);
            },
            "space"_a, "tokens"_a, "first"_a,
            "(ticket for copied(), pages from `first` on that neither slab nor disk hold, the slab rows to write them to, the "
            "first "
            "page\n"
            "not looked at); ticket 0: none, for now.")
        .def(
            "wait_room",
            [](Core& core, double seconds) {
                nb::gil_scoped_release release;
                core.use().wait([](const Driver& driver) { return driver.room_to_put() || driver.writes_paused(); }, seconds);
                return core.use().look([](const Driver& driver) { return driver.room_to_put(); });
            },
            "seconds"_a, "Waits until put() finds room; False after `seconds`, or where the disk makes none.")
        .def(
            "cold_pages",
            [](Core& core, const nb::bytes& space, const Ints& tokens) {
                const Key key = key_of(space, "the namespace");
                return core.use().decide([&](Driver& d, double now) { return d.cold_pages(now, key, view(tokens)); });
            },
            "space"_a, "tokens"_a, "How many pages, from the first on, slab or disk hold.")
        .def(
            "fetch",
            [](Core& core, const nb::bytes& space, const Ints& tokens, std::uint32_t first, std::uint32_t most) {
                const Key key = key_of(space, "the namespace");
                if (core.use().closed()) throw std::runtime_error("this cache is closed; open another one");
                return core.use().decide([&](Driver& d, double now) { return d.fetch(now, key, view(tokens), first, most); });
            },
            "space"_a, "tokens"_a, "first"_a, "most"_a,
            "Brings pages to the slab and keeps them there until end_fetch(id); id 0: slab and disk do not have the first of them.")
        .def(
            "fetched",
            [](Core& core, std::uint64_t id, double seconds) {
                {
                    nb::gil_scoped_release release;
                    core.use().wait([id](const Driver& driver) { return driver.fetched(id); }, seconds);
                }
                return array_of(core.use().look([&](const Driver& driver) { return driver.fetched_rows(id); }));
            },
            "id"_a, "seconds"_a, "The slab rows of the pages that came within `seconds`, from the first on.")
        .def(
            "end_fetch",
            [](Core& core, std::uint64_t id) { core.use().decide([&](Driver& d, double now) { d.end_fetch(now, id); }); }, "id"_a)
        .def(
            "take_copies",
            [](Core& core, double seconds) {
                std::vector<CopyBatch> batches;
                {
                    nb::gil_scoped_release release;
                    batches = core.use().take_copies(seconds);
                }
                nb::list out;
                for (const CopyBatch& batch : batches)
                    out.append(nb::make_tuple(batch.ticket, batch.up, array_of(batch.slab), array_of(batch.device), batch.fence));
                return out;
            },
            "seconds"_a,
            "Waits for device copies: [(ticket, up, slab rows, device rows, fence)]; empty after `seconds` or when closing.")
        .def(
            "copied",
            [](Core& core, std::uint64_t ticket, bool ok) {
                core.use().decide([&](Driver& d, double now) { d.copied(now, ticket, ok); });
            },
            "ticket"_a, "ok"_a, "Reports a copy as finished; late and unknown tickets are ignored.")
        .def(
            "wait_started",
            [](Core& core, LeaseId id, double seconds) {
                nb::gil_scoped_release release;
                return core.use().wait(
                    [id](const Driver& driver) {
                        std::vector<std::uint64_t> tickets;
                        return driver.copies_of(id, tickets);
                    },
                    seconds);
            },
            "id"_a, "seconds"_a, "Waits until everything the lease misses is at least being copied; False after `seconds`.")
        .def(
            "copies_of",
            [](Core& core, LeaseId id) {
                std::vector<std::uint64_t> tickets;
                const bool all = core.use().look([&](const Driver& driver) { return driver.copies_of(id, tickets); });
                return nb::make_tuple(all, tickets);
            },
            "id"_a, "(everything the lease misses is being copied, tickets of those copies).")
        .def(
            "describe",
            [](Core& core, const nb::bytes& space, const std::string& json) {
                const Key key = key_of(space, "the namespace");
                if (core.use().shelf()) core.use().shelf()->describe(key, json);
            },
            "space"_a, "json"_a, "Says what a namespace is, in the directory of the disk tier, sooner or later.")
        .def(
            "explain",
            [](Core& core, const nb::bytes& space, const Ints& tokens, const Longs& offsets, const Longs& lengths,
               const nb::bytes& digests) {
                const Key key = key_of(space, "the namespace");
                const std::vector<MediaSpan> media = media_of(offsets, lengths, digests);
                const Explanation found =
                    core.use().decide([&](Driver& driver, double now) { return driver.explain(now, key, view(tokens), media); });
                static constexpr const char* places[] = {"", "coming", "there", "left alone"};
                const auto name = [](PlaceInTier place) { return places[static_cast<int>(place)]; };
                nb::list pages;
                for (const Explanation::Page& page : found.pages)
                    pages.append(nb::make_tuple(name(page.gpu), name(page.cpu), name(page.disk)));
                return nb::make_tuple(pages, array_of(found.closest), found.same);
            },
            "space"_a, "tokens"_a, "media_offsets"_a, "media_lengths"_a, "media_digests"_a,
            "([(gpu, cpu, disk) of each page that is somewhere: '', 'coming', 'there' or 'left alone'], tokens of the closest page "
            "that\n"
            "comes next, how many of its first tokens agree).")
        .def("purge", &purge_own, nb::kw_only(), "all"_a = false, "spaces"_a = nb::none(), "before"_a = nb::none(),
             "prefixes"_a = nb::none(), "seconds"_a = 5.0,
             "Drops pages from memory and from the shelves of this process, once what is moving has settled (`seconds` at most): a "
             "dict as\n"
             "purge() gives, and the copies in memory: dropped from gpu and cpu, and in_use. Blocks.")
        .def("closed", [](Core& core) { return core.use().closed(); })
        .def(
            "own_shelves",
            [](Core& core) {
                nb::gil_scoped_release release;
                return core.use().shelf() ? core.use().shelf()->own_shelves() : std::vector<std::string>{};
            },
            "Names of the shelves that this process owns.")
        .def(
            "slab",
            [](Core& core) -> nb::tuple {
                const Slab* slab = core.use().slab();
                if (!slab) return nb::make_tuple(0, 0, 0, -1);
                return nb::make_tuple(reinterpret_cast<std::uintptr_t>(slab->base()), slab->rows(), slab->row_stride(), slab->fd());
            },
            "(address, rows, stride in bytes, file descriptor or -1) of the CPU tier's memory.")
        .def("prefaulted_bytes", [](Core& core) { return core.use().slab() ? core.use().slab()->prefaulted_bytes() : 0; })
        .def("stats", &stats, "Counters by tier and in total.")
        .def("wait_health", &wait_health, "seen"_a, "seconds"_a,
             "Waits until the health of the disk tier has changed more often than `seen` times: (changes, sentence, seconds since "
             "1970\n"
             "that it has been ill, closed).")
        .def("events", &events, "Events since the last call: [(sequence, seconds, kind, tier, source, depth in pages, key)].")
        .def(
            "flush",
            [](Core& core, double seconds) {
                nb::gil_scoped_release release;
                return core.use().wait([](const Driver& driver) { return driver.idle(); }, seconds);
            },
            "seconds"_a, "Waits until nothing is moving; False after `seconds`.")
        .def(
            "check_integrity",
            [](Core& core) {
                std::string fault;
                core.use().look([&](const Driver& driver) { return driver.check_integrity(fault); });
                return fault;
            },
            "Everything provable about the ledger: '' or the first fault.")
        .def(
            "close",
            [](Core& core, double seconds) {
                nb::gil_scoped_release release;
                return core.use().close(seconds);
            },
            "seconds"_a, "Ends the threads, waiting for moves at most `seconds`. True: everything was saved.");
}
