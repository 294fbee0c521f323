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

using Layers = nb::ndarray<const std::int64_t, nb::shape<-1, 4>, nb::c_contig, nb::device::cpu>;

Stores stores(bool streaming) { return streaming ? Stores::streaming : Stores::plain; }

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
           const Ints& from_rows, std::size_t offset, std::size_t bytes, bool streaming) {
            if (to_rows.size() != from_rows.size()) throw nb::value_error("to_rows and from_rows differ in length");
            const auto target = view(to_rows), source = view(from_rows);
            nb::gil_scoped_release release;
            copy_rows(pool_at(to, to_stride), target, pool_at(from, from_stride), source, offset, bytes, stores(streaming));
        },
        "to"_a, "to_stride"_a, "to_rows"_a, "from_"_a, "from_stride"_a, "from_rows"_a, "offset"_a, "bytes"_a, "streaming"_a = false,
        "Copies bytes [offset, offset + bytes) of rows between two pools in host memory, given by address and stride (bytes). Row "
        "i of\n"
        "from_rows goes to row i of to_rows (int32). streaming: round the processor's caches, for what nobody reads soon. The "
        "caller\n"
        "keeps both pools alive and the rows in range. Releases the interpreter lock.");

    module.def(
        "copy_layers",
        [](const Layers& layers, const Ints& blocks, std::uintptr_t pool, std::size_t stride, const Ints& rows, bool up,
           bool streaming) {
            if (blocks.size() != rows.size()) throw nb::value_error("blocks and rows differ in length");
            std::vector<LayerBlocks> parts;
            for (std::size_t i = 0; i < layers.shape(0); ++i)
                parts.push_back({pool_at(static_cast<std::uintptr_t>(layers(i, 0)), static_cast<std::size_t>(layers(i, 1))),
                                 static_cast<std::size_t>(layers(i, 2)), static_cast<std::size_t>(layers(i, 3))});
            const auto there = view(blocks), here = view(rows);
            nb::gil_scoped_release release;
            copy_layers(parts, there, pool_at(pool, stride), here, up, stores(streaming));
        },
        "layers"_a, "blocks"_a, "pool"_a, "stride"_a, "rows"_a, "up"_a, "streaming"_a = false,
        "Copies rows of a pool to blocks whose layers lie apart (up), or back. layers: int64 [layers, 4]: address of the layer's "
        "block 0,\n"
        "bytes from one block to the next, offset of its bytes in a row, bytes. Row i belongs to block i (int32). As copy_rows.");

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
