// Binding of the simulator's instances and clock; see csrc/core/simulation/fleet.hpp.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <utility>

#include "bindings/registry.hpp"
#include "core/simulation/fleet.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace poolweave::bindings {

namespace {

using simulation::Fleet;
using simulation::News;
using Keys = nb::ndarray<const std::uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using KeyTokens = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// None for no keys.
nb::object to_numpy(PayloadList&& keys) {
    if (keys.empty()) return nb::none();
    auto* list = new PayloadList(std::move(keys));
    nb::capsule owner(list, [](void* p) noexcept { delete static_cast<PayloadList*>(p); });
    return nb::cast(nb::ndarray<nb::numpy, std::uint64_t, nb::ndim<1>>(list->data(), {list->size()}, owner));
}

nb::tuple next(Fleet& self, double answer) {
    simulation::Told told = self.next(answer);
    return nb::make_tuple(static_cast<int>(told.news), told.a, told.b, to_numpy(std::move(told.gone)));
}

template <typename Class>
void name_news(Class& cls) {
    const std::pair<const char*, News> names[] = {
        {"DONE", News::kDone}, {"CALL", News::kCall}, {"ARRIVED", News::kArrived}, {"PREFILLED", News::kPrefilled},
        {"FINISHED", News::kFinished}, {"HAND_OVER_FAILED", News::kHandOverFailed}, {"RETURNED", News::kReturned},
        {"REPLICATED", News::kReplicated}, {"PREFILL_TIME", News::kPrefillTime}, {"STEP_TIME", News::kStepTime},
        {"TRANSFER_TIME", News::kTransferTime},
    };
    for (const auto& [name, news] : names) cls.attr(name) = static_cast<int>(news);
}

}  // namespace

void register_simulation(nb::module_& m) {
    nb::class_<Fleet> fleet(m, "SimulatedFleet", "All instances of a simulation and the clock over them.");
    fleet
        .def(
            "__init__",
            [](Fleet* self, std::int64_t block_tokens, std::int64_t kv_bytes_per_token, bool prefill_keeps, bool decode_keeps,
               bool returns, double horizon_s) {
                new (self) Fleet({prefill_keeps, decode_keeps, returns, block_tokens, kv_bytes_per_token}, horizon_s);
            },
            nb::kw_only(), "block_tokens"_a, "kv_bytes_per_token"_a, "prefill_keeps"_a, "decode_keeps"_a, "returns"_a, "horizon_s"_a)
        .def(
            "add_request",
            [](Fleet& self, const Keys& keys, const KeyTokens& tokens, std::size_t prompt_blocks, std::int64_t num_tokens,
               std::int64_t output_tokens) {
                return self.add_request({{keys.data(), keys.size()}, {tokens.data(), tokens.size()}, prompt_blocks, num_tokens, output_tokens});
            },
            "keys"_a.noconvert(), "tokens"_a.noconvert(), "prompt_blocks"_a, "num_tokens"_a, "output_tokens"_a,
            nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), "The arrays are kept, not copied.")
        .def(
            "add_seat",
            [](Fleet& self, bool pauses, std::size_t cache_blocks, std::int64_t kv_tokens, double slowness) {
                return self.add_seat({pauses, cache_blocks, kv_tokens, slowness});
            },
            nb::kw_only(), "pauses"_a, "cache_blocks"_a, "kv_tokens"_a, "slowness"_a)
        .def("arrivals", &Fleet::arrivals, "times_s"_a)
        .def("begin_life", &Fleet::begin_life, "seat"_a)
        .def("end_life", &Fleet::end_life, "seat"_a)
        .def("call_at", &Fleet::call_at, "time_s"_a, "mark"_a)
        .def(
            "start",
            [](Fleet& self, std::uint32_t number, std::uint32_t prefill, std::uint32_t decode, std::int32_t fetch_from, std::size_t fetch_blocks) {
                return self.start({.number = number, .prefill = prefill, .decode = decode, .fetch_from = fetch_from, .fetch_blocks = fetch_blocks});
            },
            "number"_a, "prefill"_a, "decode"_a, "fetch_from"_a = -1, "fetch_blocks"_a = 0)
        .def("give_up", &Fleet::give_up, "job"_a)
        .def(
            "replicate",
            [](Fleet& self, std::uint32_t number, std::uint32_t source, std::uint32_t target, std::size_t blocks) {
                self.replicate({number, source, target, blocks});
            },
            "number"_a, "source"_a, "target"_a, "blocks"_a)
        .def(
            "replication",
            [](const Fleet& self, std::uint64_t number) {
                const simulation::Replication& replication = self.replication(number);
                return nb::make_tuple(replication.number, replication.target, replication.blocks);
            },
            "number"_a, nb::sig("def replication(self, number: int) -> tuple[int, int, int]"), "Request, target seat, blocks.")
        .def(
            "keep",
            [](Fleet& self, std::uint32_t seat, std::uint32_t number, std::size_t blocks) { return to_numpy(self.keep(seat, number, blocks)); },
            "seat"_a, "number"_a, "blocks"_a,
            nb::sig("def keep(self, seat: int, number: int, blocks: int) -> numpy.typing.NDArray[numpy.uint64] | None"))
        .def("next", &next, "answer"_a,
             nb::sig("def next(self, answer: float) -> tuple[int, int, int, numpy.typing.NDArray[numpy.uint64] | None]"))
        .def("now", &Fleet::now)
        .def("busy_s", &Fleet::busy_s, "seat"_a)
        .def_prop_ro("planned", &Fleet::planned)
        .def_prop_ro("events", &Fleet::events)
        .def_prop_ro("moved_bytes", &Fleet::moved_bytes);
    name_news(fleet);
}

}  // namespace poolweave::bindings
