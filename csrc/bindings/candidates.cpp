// Binding of a prompt's candidates; see csrc/core/candidates.hpp.
#include "core/candidates.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <optional>

#include "bindings/registry.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace poolweave::bindings {

namespace {

template <typename T>
using Input = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <typename T>
std::span<const T> span_of(const Input<T>& array) {
    return {array.data(), array.size()};
}

template <typename T>
auto view(std::span<T> values, nb::handle owner) {
    return nb::ndarray<nb::numpy, T, nb::ndim<1>>(values.data(), {values.size()}, owner);
}

template <typename T>
std::vector<T> copy_of(const Input<T>& array) {
    return {array.data(), array.data() + array.size()};
}

}  // namespace

void register_candidates(nb::module_& m) {
    nb::class_<Candidates>(m, "CandidateTable", "What each instance that may take a prompt holds of it, has to do, and would take.")
        .def(
            "__init__",
            [](Candidates* self, const Input<std::int64_t>& slots, const Input<double>& pending_s, const std::optional<Input<double>>& slowness) {
                new (self) Candidates(span_of(slots), span_of(pending_s), slowness ? span_of(*slowness) : std::span<const double>{});
            },
            "slots"_a.noconvert(), "pending_s"_a.noconvert(), "slowness"_a.none() = nb::none())
        .def_static(
            "of",
            [](const Input<std::int64_t>& slots, const Input<std::int32_t>& held_tokens, const Input<double>& queued_s,
               const Input<double>& own_s, double uncached_s) {
                return new Candidates(copy_of(slots), copy_of(held_tokens), copy_of(queued_s), copy_of(own_s), uncached_s);
            },
            "slots"_a, "held_tokens"_a, "queued_s"_a, "own_s"_a, "uncached_s"_a, "One with these entries.")
        .def(
            "score",
            [](Candidates& self, PromptTree& tree, const Input<std::uint64_t>& keys, double now, std::int32_t block_tokens) {
                self.score(tree, span_of(keys), now, block_tokens);
            },
            "tree"_a, "keys"_a.noconvert(), "now"_a, "block_tokens"_a, "Adds what this tree believes to be held.")
        .def(
            "believe",
            [](Candidates& self, const Input<double>& credit, std::int32_t block_tokens) { self.believe(span_of(credit), block_tokens); },
            "credit"_a.noconvert(), "block_tokens"_a)
        .def("distinct", &Candidates::distinct, "The different numbers of tokens held, ascending.")
        .def(
            "price", [](Candidates& self, const std::vector<double>& own_s, double uncached_s) { self.price(own_s, uncached_s); },
            "own_s"_a, "uncached_s"_a, "Times by distinct(), and with nothing held, at slowness 1.")
        .def("__len__", &Candidates::size)
        .def(
            "at",
            [](Candidates& self, std::size_t i) {
                if (i >= self.size()) throw nb::index_error();
                return nb::make_tuple(self.slots()[i], self.held_tokens()[i], self.queued_s()[i], self.own_s()[i]);
            },
            "i"_a, nb::sig("def at(self, i: int) -> tuple[int, int, float, float]"), "Slot, tokens held, queued and own seconds.")
        .def_prop_ro("longest", &Candidates::longest)
        .def_prop_ro("held_tokens", [](nb::object self) { return view(nb::cast<Candidates&>(self).held_tokens(), self); })
        .def_prop_ro("queued_s", [](nb::object self) { return view(nb::cast<Candidates&>(self).queued_s(), self); })
        .def_prop_ro("own_s", [](nb::object self) { return view(nb::cast<Candidates&>(self).own_s(), self); })
        .def_prop_ro("uncached_s", [](nb::object self) { return view(nb::cast<Candidates&>(self).uncached_s(), self); })
        .def("draw_queued", &Candidates::draw_queued, "lot"_a, "The least queued.")
        .def("draw_predicted", &Candidates::draw_predicted, "lot"_a, "The least queued and own time.")
        .def("draw_uncached", &Candidates::draw_uncached, "lot"_a, "The least queued and time with nothing held.");
}

}  // namespace poolweave::bindings
