// Binding of block keys and of the index that KV events feed; see csrc/core/{chained_keys,event_index,event_stream}.hpp.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <memory>

#include "bindings/array_arg.hpp"
#include "bindings/radix_results.hpp"
#include "bindings/registry.hpp"
#include "core/chained_keys.hpp"
#include "core/error.hpp"
#include "core/event_index.hpp"
#include "core/event_stream.hpp"
#include "core/radix_tree.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace poolweave::bindings {

namespace {

constexpr std::size_t kLongPrompt = 8 << 10;  // tokens: about 20 us to hash or to look up

std::string_view view(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

template <class T, class... Shape>
nb::object to_numpy(std::vector<T>&& list, Shape... shape) {
    auto kept = std::make_unique<std::vector<T>>(std::move(list));
    T* data = kept->data();
    nb::capsule owner(kept.release(), [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
    return nb::cast(nb::ndarray<nb::numpy, T>(data, {static_cast<std::size_t>(shape)...}, owner));
}

nb::object keys(nb::handle array, std::size_t block_tokens, const nb::bytes& parent) {
    const TokensArg tokens(array);
    BlockKey first;
    if (block_tokens == 0) throw Error(Code::kConfig, "block_tokens must be positive, got 0");
    if (parent.size() != first.size()) throw Error(Code::kConfig, "a parent key has 16 bytes, got " + std::to_string(parent.size()));
    std::copy_n(static_cast<const std::uint8_t*>(parent.data()), first.size(), first.begin());
    const std::size_t count = tokens.span().size() / block_tokens;
    std::vector<std::uint8_t> bytes(count * sizeof(BlockKey));
    const std::span<BlockKey> out(reinterpret_cast<BlockKey*>(bytes.data()), count);
    without_gil(tokens.span().size() > kLongPrompt, [&] {
        require_tokens(tokens.span());
        chained_keys(tokens.span(), block_tokens, first, out);
        return 0;
    });
    return to_numpy(std::move(bytes), count, sizeof(BlockKey));
}

nb::object match(const EventIndex& index, nb::handle array, const nb::bytes& scope, const std::vector<nb::bytes>& extra_keys) {
    const TokensArg tokens(array);
    std::vector<std::string_view> extras;
    for (const nb::bytes& raw : extra_keys) extras.push_back(view(raw));
    std::vector<std::int32_t> scores(index.num_slots());
    without_gil(tokens.span().size() > kLongPrompt, [&] { return index.match(tokens.span(), view(scope), extras, scores); });
    const std::size_t count = scores.size();
    return to_numpy(std::move(scores), count);
}

nb::list inventory(const EventIndex& index, std::uint32_t source) {
    std::vector<StoredRun> runs = without_gil(true, [&] { return index.inventory(source); });
    nb::list list;
    for (StoredRun& run : runs) {
        const std::size_t hashes = run.hashes.size(), tokens = run.tokens.size();
        const nb::object parent = run.has_parent ? nb::cast(run.parent) : nb::none();
        list.append(nb::make_tuple(parent, static_cast<int>(run.media), nb::bytes(run.scope.data(), run.scope.size()), to_numpy(std::move(run.hashes), hashes),
                                   to_numpy(std::move(run.tokens), tokens)));
    }
    return list;
}

void register_report(nb::module_& m) {
    nb::class_<EventReport>(m, "EventReport", "What one batch of KV events did, in blocks.")
        .def_ro("timestamp", &EventReport::timestamp)
        .def_ro("stored", &EventReport::stored, "Newly held.")
        .def_ro("repeated", &EventReport::repeated, "Held already.")
        .def_ro("removed", &EventReport::removed, "No longer held.")
        .def_ro("unknown", &EventReport::unknown, "Removed, but not held.")
        .def_ro("orphans", &EventReport::orphans, "Stored after a parent that is not held: not credited.")
        .def_ro("doubtful", &EventReport::doubtful, "Removed once after several stores: no longer credited, perhaps still there.")
        .def_ro("conflicts", &EventReport::conflicts, "A hash in use for another block: not credited.")
        .def_ro("skipped", &EventReport::skipped, "Of another block size, or without plain tokens.")
        .def_ro("refused", &EventReport::refused, "Above the source's max_blocks.")
        .def_ro("clears", &EventReport::clears, "AllBlocksCleared events.")
        .def_ro("several_groups", &EventReport::several_groups, "The source keeps several cache groups.");
    nb::class_<EventIndexStats>(m, "EventIndexStats")
        .def_ro("num_blocks", &EventIndexStats::num_blocks)
        .def_ro("num_entries", &EventIndexStats::num_entries, "(source, block) pairs.")
        .def_ro("num_sources", &EventIndexStats::num_sources)
        .def_ro("nbytes", &EventIndexStats::nbytes);
}

void register_event_stream(nb::module_& m) {
    nb::class_<EventStream>(m, "NativeEventStream", "One source's batches in order. One owner; the counters may be read by any thread.")
        .def(nb::init<EventIndex&, std::uint32_t>(), "index"_a, "source"_a, nb::keep_alive<1, 2>())
        .def("follow", [](EventStream& self, const nb::bytes& payload) {
            const std::string_view raw = view(payload);
            return without_gil(true, [&] { return self.follow(raw); });
        }, "payload"_a, "Applies the next batch; None when all went as told. Raises EventsMalformed and then applies nothing.")
        .def("followed", [](const EventStream& self, std::uint64_t sequence, const nb::bytes& payload) {
            return self.followed(sequence, view(payload));
        }, "sequence"_a, "payload"_a, "Whether the batch under this number was exactly this one, as far as it is remembered.")
        .def("begin_anew", &EventStream::begin_anew, "sequence"_a, nb::call_guard<nb::gil_scoped_release>(),
             "Forgets all that the source holds and told.")
        .def("set_trusted", &EventStream::set_trusted, "trusted"_a, nb::call_guard<nb::gil_scoped_release>())
        .def_prop_ro("next_sequence", &EventStream::next_sequence)
        .def_prop_ro("num_batches", &EventStream::num_batches, "Those given to follow(), malformed ones too.");
}

}  // namespace

void register_events(nb::module_& m) {
    m.def("chained_keys", &keys, "tokens"_a, "block_tokens"_a, "parent"_a,
          nb::sig("def chained_keys(tokens: NDArray[numpy.int32], block_tokens: int, parent: bytes) -> NDArray[numpy.uint8]"),
          "Chained 128-bit keys of the whole blocks of int32 tokens.");
    m.def("kv_event_scope", [](std::optional<std::string_view> adapter, std::optional<std::string_view> salt) {
        const std::string scope = kv_event_scope(adapter, salt);
        return nb::bytes(scope.data(), scope.size());
    }, "adapter"_a.none(), "salt"_a.none(), "The scope of an adapter and a salt.");
    register_report(m);
    nb::class_<EventIndex>(m, "NativeEventIndex", "Which sources hold which blocks, as told by KV events. Thread-safe.")
        .def(nb::init<std::uint32_t>(), "block_tokens"_a)
        .def("add_source", [](EventIndex& self, bool counts_copies, std::size_t max_blocks, std::uint8_t credited_media) {
            return self.add_source({counts_copies, max_blocks, credited_media});
        }, "counts_copies"_a, "max_blocks"_a, "credited_media"_a)
        .def("drop_source", &EventIndex::drop_source, "source"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("set_trusted", &EventIndex::set_trusted, "source"_a, "trusted"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("clear", &EventIndex::clear, "source"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("apply", [](EventIndex& self, std::uint32_t source, const nb::bytes& payload) {
            const std::string_view raw = view(payload);
            return without_gil(true, [&] { return self.apply(source, raw); });
        }, "source"_a, "payload"_a, "Applies one msgpack batch. Raises EventsMalformed and changes nothing when it is none.")
        .def("match", &match, "tokens"_a, "scope"_a, "extra_keys"_a,
             nb::sig("def match(self, tokens: NDArray[numpy.int32], scope: bytes, extra_keys: Sequence[bytes]) -> NDArray[numpy.int32]"),
             "Leading blocks that each slot holds; 0 for sources that are not trusted.")
        .def("inventory", &inventory, "source"_a,
             nb::sig("def inventory(self, source: int) -> "
                     "list[tuple[int | None, int, bytes, NDArray[numpy.uint64], NDArray[numpy.int32]]]"),
             "Runs of (parent, media, scope, hashes, tokens) that a source holds, parents first.")
        .def("num_held", &EventIndex::num_held, "source"_a)
        .def("stats", &EventIndex::stats, nb::call_guard<nb::gil_scoped_release>())
        .def("check", &EventIndex::check, nb::call_guard<nb::gil_scoped_release>(), "What is wrong; empty when nothing is.")
        .def_prop_ro("block_tokens", &EventIndex::block_tokens);
    register_event_stream(m);
}

}  // namespace poolweave::bindings
