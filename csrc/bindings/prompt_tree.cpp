// Binding of the prompt tree and of block keys; see csrc/core/prompt_tree.hpp.
#include "core/prompt_tree.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "bindings/registry.hpp"
#include "core/block_keys.hpp"
#include "core/error.hpp"
#include "core/lowest.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace poolweave::bindings {

namespace {

using Tokens = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Keys = nb::ndarray<const std::uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Scores = nb::ndarray<std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

using Slots = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Costs = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

constexpr std::size_t kLong = 1024;  // keys: a call of about 20 us

std::span<const std::uint64_t> view(const Keys& keys) { return {keys.data(), keys.size()}; }

template <typename T>
using Array = nb::ndarray<nb::numpy, T, nb::ndim<1>>;

template <typename T>
Array<T> to_numpy(std::unique_ptr<T[]> data, std::size_t size) {
    T* raw = data.get();
    nb::capsule owner(raw, [](void* p) noexcept { delete[] static_cast<T*>(p); });
    (void)data.release();
    return Array<T>(raw, {size}, owner);
}

auto keys_of(const Tokens& tokens, std::size_t block_tokens, std::uint64_t seed) {
    if (block_tokens == 0) throw Error(Code::kConfig, "block_tokens must be positive, got 0");
    if (any_negative({tokens.data(), tokens.size()})) throw nb::value_error("token ids must not be negative; they run from 0 to 2147483647");
    const std::size_t size = tokens.size() / block_tokens;
    auto keys = std::make_unique_for_overwrite<std::uint64_t[]>(size);
    {
        std::optional<nb::gil_scoped_release> release;
        if (size > kLong) release.emplace();
        block_keys({tokens.data(), tokens.size()}, block_tokens, seed, {keys.get(), size});
    }
    return to_numpy(std::move(keys), size);
}

// A list of plain, non-negative ints as an array; None for anything else, which poolweave.types judges.
std::optional<Array<std::int32_t>> tokens_of(const nb::typed<nb::list, nb::any>& list) {
    const std::size_t size = list.size();
    auto tokens = std::make_unique_for_overwrite<std::int32_t[]>(size);
    for (std::size_t i = 0; i < size; ++i) {
        PyObject* item = NB_LIST_GET_ITEM(list.ptr(), i);
        int overflow = 0;
        if (!PyLong_CheckExact(item)) return std::nullopt;
        const long value = PyLong_AsLongAndOverflow(item, &overflow);
        if (overflow != 0 || value < 0 || value > 0x7FFFFFFFl) return std::nullopt;
        tokens[i] = static_cast<std::int32_t>(value);
    }
    return to_numpy(std::move(tokens), size);
}

// Leading blocks that each of `slots` holds, times `scale`, into `held`.
void match_at(PromptTree& self, const Keys& keys, double now, const Slots& slots, Scores held, std::int32_t scale) {
    if (held.size() != slots.size()) throw nb::value_error("there must be one score a slot");
    const std::span<const std::int64_t> asked{slots.data(), slots.size()};
    const std::int64_t capacity = asked.empty() ? 0 : *std::max_element(asked.begin(), asked.end()) + 1;
    std::vector<std::int32_t> scores(static_cast<std::size_t>(capacity));
    self.match(view(keys), now, scores);
    for (std::size_t i = 0; i < asked.size(); ++i) held.data()[i] = scores[static_cast<std::size_t>(asked[i])] * scale;
}

std::size_t lowest_of(const Costs& costs, std::uint64_t lot) {
    if (costs.size() == 0) throw nb::value_error("there is no cost to choose from");
    return draw_lowest({costs.data(), costs.size()}, lot);
}

}  // namespace

void register_prompt_tree(nb::module_& m) {
    m.def("block_keys", &keys_of, "tokens"_a.noconvert(), "block_tokens"_a, "seed"_a,
          "Chained 64-bit keys of the whole blocks of int32 tokens.");
    m.def("tokens_of_list", &tokens_of, "tokens"_a, "A list of plain ints as int32 tokens, or None.");

    m.def("draw_lowest", &lowest_of, "costs"_a.noconvert(), "lot"_a,
          "Index of the lowest cost, of equal ones the one that the number `lot` falls on.");

    nb::class_<PromptTree::Stats>(m, "PromptTreeStats")
        .def_ro("blocks", &PromptTree::Stats::blocks)
        .def_ro("entries", &PromptTree::Stats::entries)
        .def_ro("nodes", &PromptTree::Stats::nodes)
        .def_ro("nbytes", &PromptTree::Stats::nbytes)
        .def_ro("evicted", &PromptTree::Stats::evicted)
        .def_ro("expired", &PromptTree::Stats::expired)
        .def_ro("orphans", &PromptTree::Stats::orphans);

    nb::class_<PromptTree>(m, "PromptTree")
        .def(
            "__init__",
            [](PromptTree* self, std::optional<std::size_t> max_bytes) {
                if (max_bytes) {
                    new (self) PromptTree(*max_bytes);
                } else {
                    new (self) PromptTree();
                }
            },
            "max_bytes"_a.none() = nb::none())
        .def(
            "insert",
            [](PromptTree& self, const Keys& keys, std::uint32_t slot, double expiry, double now,
               std::optional<std::uint64_t> parent) {
                std::optional<nb::gil_scoped_release> release;
                if (keys.size() > kLong) release.emplace();
                return self.insert(view(keys), slot, expiry, now, parent);
            },
            "keys"_a.noconvert(), "slot"_a, "expiry"_a, "now"_a, "parent"_a.none() = nb::none())
        .def(
            "remove",
            [](PromptTree& self, const Keys& keys, std::uint32_t slot, double now) {
                const nb::gil_scoped_release release;
                return self.remove(view(keys), slot, now);
            },
            "keys"_a.noconvert(), "slot"_a, "now"_a)
        .def(
            "match",
            [](PromptTree& self, const Keys& keys, double now, Scores scores) {
                return self.match(view(keys), now, {scores.data(), scores.size()});
            },
            "keys"_a.noconvert(), "now"_a, "scores"_a.noconvert())
        .def("match_at", &match_at, "keys"_a.noconvert(), "now"_a, "slots"_a.noconvert(), "held"_a.noconvert(), "scale"_a)
        .def("limit", &PromptTree::limit, "slot"_a, "blocks"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("retire", &PromptTree::retire, "slot"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("sweep", &PromptTree::sweep, "now"_a, "max_nodes"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("entries", &PromptTree::entries, "slot"_a)
        .def("stats", &PromptTree::stats)
        .def("check", &PromptTree::check, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace poolweave::bindings
