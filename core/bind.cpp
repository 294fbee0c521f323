// The extension module kvstrata._core: a thin skin over the runtime. Arrays in, arrays out; nothing crosses page by page.
// Calls that can wait release the interpreter lock; the others take microseconds and keep it.
#include "bind.hpp"

#include <nanobind/stl/string.h>
#include <unistd.h>

#include <memory>

#include "copy.hpp"
#include "keys.hpp"
#include "prefault.hpp"

namespace {

RowPool pool_at(std::uintptr_t base, std::size_t stride) { return {reinterpret_cast<std::byte*>(base), stride}; }

// An array of Python's and what fills it, which therefore ends before the memory does.
class ArrayPrefault {
   public:
    explicit ArrayPrefault(nb::ndarray<std::uint8_t, nb::c_contig, nb::device::cpu> memory)
        : memory_(std::move(memory)),
          prefault_(std::make_unique<Prefault>(reinterpret_cast<std::byte*>(memory_.data()), memory_.nbytes(), kChunk)) {}
    ~ArrayPrefault() {
        if (getpid() != pid_) prefault_.release();  // the child of a fork has none of its parent's threads, and cannot wait for one
    }
    void stop() {
        if (getpid() == pid_) prefault_->stop();
    }
    std::size_t filled_bytes() const { return prefault_->filled_bytes(); }

   private:
    static constexpr std::size_t kChunk = 16 << 20;
    const pid_t pid_ = getpid();
    nb::ndarray<std::uint8_t, nb::c_contig, nb::device::cpu> memory_;
    std::unique_ptr<Prefault> prefault_;
};

}  // namespace

NB_MODULE(_core, module) {
    module.doc() = "The native core of kvstrata: ledger, slab, shelf and their threads. Used through kvstrata.cache.";
    module.attr("__version__") = KVSTRATA_VERSION;

    module.def(
        "copy_rows",
        [](std::uintptr_t to, std::size_t to_stride, const Ints& to_rows, std::uintptr_t from, std::size_t from_stride,
           const Ints& from_rows, std::size_t offset, std::size_t bytes) {
            if (to_rows.size() != from_rows.size()) throw nb::value_error("to_rows and from_rows differ in length");
            const auto target = view(to_rows), source = view(from_rows);
            nb::gil_scoped_release release;
            copy_planes(pool_at(to, to_stride), target, pool_at(from, from_stride), source, offset, bytes);
        },
        "to"_a, "to_stride"_a, "to_rows"_a, "from_"_a, "from_stride"_a, "from_rows"_a, "offset"_a, "bytes"_a,
        "Copies bytes [offset, offset + bytes) of rows between two pools in host memory, given by address and stride (bytes). Row "
        "i of\n"
        "from_rows goes to row i of to_rows (int32). The caller keeps both pools alive and the rows in range. Releases the "
        "interpreter lock.");

    module.def(
        "page_key",
        [](const nb::bytes& space, const nb::bytes& parent, const Ints& tokens) {
            return bytes_of(page_key(key_of(space, "the namespace"), key_of(parent, "the parent key"), {view(tokens), {}}));
        },
        "space"_a, "parent"_a, "tokens"_a, "The 32-byte key of a page without media: see docs/disk-format.md.");

    nb::class_<ArrayPrefault>(module, "Prefault",
                              "Fills an array's memory (uint8, contiguous) with real pages in the background, whatever is in it.")
        .def(nb::init<nb::ndarray<std::uint8_t, nb::c_contig, nb::device::cpu>>(), "memory"_a)
        .def("stop", &ArrayPrefault::stop, nb::call_guard<nb::gil_scoped_release>(), "Returns after the 16 MiB in progress.")
        .def_prop_ro("filled_bytes", &ArrayPrefault::filled_bytes, "So many from the start on are filled.");

    bind_driver(module);
    bind_disk(module);
    bind_core(module);
}
