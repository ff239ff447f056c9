// Binding of the radix tree's result classes.
#include "bindings/radix_results.hpp"

#include <nanobind/stl/string.h>

namespace nb = nanobind;
using namespace nb::literals;

namespace poolweave::bindings {

namespace {

PayloadView view(const PayloadList& list, nb::handle owner) { return PayloadView(list.data(), {list.size()}, owner); }

std::string describe(const Inserted& inserted) {
    return "Inserted(num_tokens=" + std::to_string(inserted.num_tokens) + ", num_new=" + std::to_string(inserted.num_new) +
           ", duplicates=" + std::to_string(inserted.duplicates.size()) + ", evicted=" + std::to_string(inserted.evicted.size()) + ")";
}

void register_match(nb::module_& m) {
    nb::class_<MatchResult>(m, "Match", "The longest indexed prefix of a prompt. A pinned one keeps its path until it is closed.")
        .def_prop_ro("num_tokens", [](const MatchResult& self) { return self.match().num_tokens; }, "Whole blocks only.")
        .def_prop_ro("blocks", [](nb::object self) { return view(nb::cast<MatchResult&>(self).match().blocks, self); },
                     "Payloads in prompt order, uint64, read-only.")
        .def_prop_ro("miss_reason", [](const MatchResult& self) { return self.match().miss_reason; },
                     "Why the block after the last one is not here; NONE when every whole block matched.")
        .def_prop_ro("pinned", [](const MatchResult& self) { return self.match().pinned != kNoNode; })
        .def("close", &MatchResult::close, "Gives the pin back; harmless twice.")
        .def("__enter__", [](nb::object self) { return self; }, nb::sig("def __enter__(self) -> Match"))
        .def("__exit__", [](MatchResult& self, nb::args) { self.close(); }, nb::sig("def __exit__(self, *args: object) -> None"))
        .def("__repr__", [](const MatchResult& self) {
            return "Match(num_tokens=" + std::to_string(self.match().num_tokens) + ")";
        });
}

void register_inserted(nb::module_& m) {
    nb::class_<Inserted>(m, "Inserted", "What became of the blocks given to insert().")
        .def_ro("num_tokens", &Inserted::num_tokens, "Tokens indexed along this path now; fewer than given only under a byte cap.")
        .def_ro("num_new", &Inserted::num_new, "Blocks that the index took by this call: the last ones of those now indexed.")
        .def_prop_ro("duplicates", [](nb::object self) { return view(nb::cast<Inserted&>(self).duplicates, self); },
                     "Given payloads that were not taken, since these blocks were indexed already: they stay the caller's.")
        .def_prop_ro("surplus", [](nb::object self) { return view(nb::cast<Inserted&>(self).surplus, self); },
                     "Those duplicates for which the index holds another payload: second copies, to be freed.")
        .def_prop_ro("evicted", [](nb::object self) { return view(nb::cast<Inserted&>(self).evicted, self); },
                     "Payloads that the index gave up, to stay under its caps or because their time to live was over.")
        .def("__repr__", &describe);
}

void register_stats(nb::module_& m) {
    const auto counts = [](const std::uint64_t (&list)[kMissReasons]) {
        nb::dict dict;
        for (std::size_t i = 1; i < kMissReasons; ++i) dict[nb::cast(static_cast<MissReason>(i))] = list[i];
        return dict;
    };
    nb::class_<RadixStats>(m, "RadixStats", "A snapshot of a radix tree's sizes and counters.")
        .def_ro("num_blocks", &RadixStats::num_blocks)
        .def_ro("num_nodes", &RadixStats::num_nodes)
        .def_ro("num_namespaces", &RadixStats::num_namespaces)
        .def_ro("pinned_blocks", &RadixStats::pinned_blocks)
        .def_ro("nbytes", &RadixStats::nbytes)
        .def_ro("lookups", &RadixStats::lookups)
        .def_ro("asked_blocks", &RadixStats::asked_blocks)
        .def_ro("hit_blocks", &RadixStats::hit_blocks)
        .def_prop_ro("hit_rate", [](const RadixStats& self) {
            return self.asked_blocks == 0 ? 0.0 : static_cast<double>(self.hit_blocks) / static_cast<double>(self.asked_blocks);
        }, "Whole blocks found among those looked up.")
        .def_ro("inserted_blocks", &RadixStats::inserted_blocks)
        .def_ro("duplicate_blocks", &RadixStats::duplicate_blocks)
        .def_ro("refused_blocks", &RadixStats::refused_blocks)
        .def_prop_ro("misses", [counts](const RadixStats& self) { return counts(self.misses); },
                     nb::sig("def misses(self) -> dict[MissReason, int]"))
        .def_prop_ro("gone", [counts](const RadixStats& self) { return counts(self.gone); },
                     nb::sig("def gone(self) -> dict[MissReason, int]"));
}

}  // namespace

void register_radix_results(nb::module_& m) {
    nb::enum_<MissReason>(m, "MissReason", "Why a lookup stopped where it did.")
        .value("NONE", MissReason::kNone, "Nothing is missing.")
        .value("NEVER_STORED", MissReason::kNeverStored, "Nobody inserted it, or so long ago that it is forgotten.")
        .value("EVICTED", MissReason::kEvicted, "Dropped to make room.")
        .value("EXPIRED", MissReason::kExpired, "Not used for the time to live.")
        .value("DELETED", MissReason::kDeleted, "Deleted or cleared by its owner.")
        .value("OTHER_IDENTITY", MissReason::kOtherIdentity, "Its first block is stored, but under another namespace.")
        .value("INSTANCE_GONE", MissReason::kInstanceGone, "Its holder died or left.")
        .value("IN_FLIGHT", MissReason::kInFlight, "Announced, not arrived yet.")
        .value("TIMEOUT", MissReason::kTimeout, "Asked for, did not come in time.");
    register_match(m);
    register_inserted(m);
    register_stats(m);
}

}  // namespace poolweave::bindings
