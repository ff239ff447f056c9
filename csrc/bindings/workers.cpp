// Binding of the board and its workers; see csrc/core/decode. A worker keeps its board alive.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <functional>

#include "bindings/decode.hpp"
#include "bindings/registry.hpp"
#include "core/decode/attention_worker.hpp"
#include "core/decode/board.hpp"
#include "core/decode/ffn_worker.hpp"
#include "core/decode/hidden_link.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace poolweave::bindings {

namespace {

using decode::Board;
using Ids = std::vector<std::int32_t>;

// Copies `from` to the front of `into`. Throws kConfig where it is longer.
void fill(std::span<std::int32_t> into, const Ids& from, const char* name) {
    if (from.size() > into.size())
        throw Error(Code::kConfig, std::to_string(from.size()) + " " + name + ", the board has room for " + std::to_string(into.size()));
    std::copy(from.begin(), from.end(), into.begin());
}

void check_index(std::int64_t index, std::uint32_t count, const char* name) {
    if (index < 0 || index >= count) throw Error(Code::kConfig, "no " + std::string(name) + " " + std::to_string(index) + " on a board of " + std::to_string(count));
}

decode::BoardShape shape_of(const Named& sizes) {
    return {number<std::uint32_t>(sizes, "slots"), number<std::uint32_t>(sizes, "max_rows"), number<std::uint32_t>(sizes, "seats"),
            number<std::uint32_t>(sizes, "max_tokens"), number<std::uint32_t>(sizes, "block_tokens"),
            number<std::uint32_t>(sizes, "max_hidden"), number<std::uint32_t>(sizes, "models"),
            number<std::uint32_t>(sizes, "events"), number<std::uint32_t>(sizes, "width")};
}

void set_model(const Board& board, std::int64_t index, float layer_cost, const std::vector<Ids>& owners) {
    check_index(index, board.shape().models, "model");
    const auto on_ranks = [](const Ids& ranks) {
        return !ranks.empty() && std::all_of(ranks.begin(), ranks.end(), [](int r) { return r >= 0 && r < static_cast<int>(decode::kMaxRanks); });
    };
    const bool fits = !owners.empty() && owners.size() <= decode::kMaxLayers && std::all_of(owners.begin(), owners.end(), on_ranks);
    if (!fits || !(layer_cost > 0)) throw Error(Code::kConfig, "a model has 1 to 256 layers, each on ranks, and a positive cost");
    decode::ModelEntry& entry = board.model(index);
    entry.num_layers = static_cast<std::int32_t>(owners.size());
    entry.layer_cost = layer_cost;
    for (std::size_t layer = 0; layer < owners.size(); ++layer) {
        entry.owners[layer] = 0;
        for (const std::int32_t rank : owners[layer]) entry.owners[layer] |= static_cast<decode::Ranks>(1U << rank);
    }
}

void set_seat(const Board& board, std::int64_t index, const Ids& tokens, std::int32_t position, std::int32_t end,
              const std::vector<Ids>& tables, const Named& sampling) {
    check_index(index, board.shape().seats, "seat");
    const bool fits = position >= 0 && position < static_cast<std::int32_t>(tokens.size()) && end > static_cast<std::int32_t>(tokens.size()) &&
                      end <= static_cast<std::int32_t>(board.shape().max_tokens);
    if (!fits) throw Error(Code::kConfig, "a request of " + std::to_string(tokens.size()) + " tokens up to " + std::to_string(end) +
                                              " at position " + std::to_string(position) + " does not fit the board");
    if (tables.empty() || tables.size() > board.shape().width)
        throw Error(Code::kConfig, std::to_string(tables.size()) + " ranks' blocks, the board has room for " + std::to_string(board.shape().width));
    decode::Seat& seat = board.seat(index);
    const Ids stops = number<Ids>(sampling, "stops");
    fill(seat.stops, stops, "stop tokens");
    fill(board.tokens(index), tokens, "tokens");
    for (std::size_t share = 0; share < tables.size(); ++share) fill(board.table(index, static_cast<int>(share)), tables[share], "blocks");
    seat.num_stops = static_cast<std::int32_t>(stops.size());
    seat.given = static_cast<std::int32_t>(tokens.size()), seat.end = end;
    seat.temperature = number<float>(sampling, "temperature"), seat.top_p = number<float>(sampling, "top_p");
    seat.seed = number<std::uint64_t>(sampling, "seed");
    seat.finish.store(decode::Finish::kRunning);
    seat.position.store(position);
}

void form(const Board& board, std::int64_t index, std::int32_t model, const Ids& seats, const Ids& ranks) {
    for (const std::int32_t rank : ranks) check_index(rank, decode::kMaxRanks, "attention rank");
    if (ranks.empty() || ranks.size() > board.shape().width || std::adjacent_find(ranks.begin(), ranks.end(), std::greater_equal<>()) != ranks.end())
        throw Error(Code::kConfig, "a batch has 1 to " + std::to_string(board.shape().width) + " attention ranks, ascending");
    check_index(index, board.shape().slots, "slot");
    check_index(model, board.shape().models, "model");
    for (const std::int32_t seat : seats) check_index(seat, board.shape().seats, "seat");
    decode::Slot& slot = board.slot(index);
    fill({slot.seats, board.shape().max_rows}, seats, "rows");
    slot.rows = static_cast<std::int32_t>(seats.size()), slot.model = model, slot.layer = 0;
    slot.attention = ranks.front(), slot.group = 0;
    for (const std::int32_t rank : ranks) slot.group |= static_cast<decode::Ranks>(1U << rank);
    slot.arrived.store(slot.group & ~(1U << slot.attention));  // the others wait for its embedding
    slot.called.store(0);
    slot.ticket = board.next_ticket();
}

void set_turn(const Board& board, std::int64_t index, std::uint32_t turn) {
    check_index(index, board.shape().slots, "slot");
    board.slot(index).turn.store(static_cast<decode::Turn>(turn), std::memory_order_release);
    for (decode::Bell& bell : board.header().attention) bell.ring();
}

template <class T>
nb::ndarray<nb::numpy, T, nb::ndim<1>> copy_of(std::span<T> from) {
    T* data = new T[from.size()];
    std::copy(from.begin(), from.end(), data);
    return {data, {from.size()}, nb::capsule(data, [](void* p) noexcept { delete[] static_cast<T*>(p); })};
}

std::span<std::int32_t> known_tokens(const Board& board, std::int64_t seat) {
    check_index(seat, board.shape().seats, "seat");
    return board.tokens(seat).first(static_cast<std::size_t>(board.seat(seat).position.load(std::memory_order_acquire)) + 1);
}

// [events, 6]: start ns, end ns, slot, model, layer, rows; the oldest first.
nb::ndarray<nb::numpy, std::int64_t, nb::ndim<2>> events_of(const Board& board, std::int64_t worker) {
    check_index(worker, 2 * decode::kMaxRanks, "worker");
    const auto kept = board.events(worker);
    const std::uint64_t count = board.header().events[worker].load(std::memory_order_acquire);
    const std::size_t rows = std::min<std::uint64_t>(count, kept.size());
    auto* data = new std::int64_t[rows * 6];
    for (std::size_t i = 0; i < rows; ++i) {
        const decode::Event& e = kept[(count - rows + i) % kept.size()];
        const std::int64_t row[6] = {e.start_ns, e.end_ns, e.slot, e.model, e.layer, e.rows};
        std::copy(row, row + 6, data + i * 6);
    }
    return {data, {rows, 6}, nb::capsule(data, [](void* p) noexcept { delete[] static_cast<std::int64_t*>(p); })};
}

void register_board(nb::module_& m) {
    nb::class_<Board>(m, "Board", "Shared memory over which workers and host hand batches to each other.")
        .def_static("create", [](const Named& sizes) { return Board::create(shape_of(sizes)); }, "sizes"_a)
        .def_static("attach", &Board::attach, "fd"_a)
        .def_prop_ro("fd", &Board::fd)
        .def("set_model", &set_model, "model"_a, "layer_cost"_a, "owners"_a)
        .def("set_seat", &set_seat, "seat"_a, "tokens"_a, "position"_a, "end"_a, "tables"_a, "sampling"_a, "`tables`: blocks on each attention rank that has some of the model's heads.")
        .def("form", &form, "slot"_a, "model"_a, "seats"_a, "ranks"_a = Ids{0}, "Compose a batch in a slot that is idle or the host's; `ranks`: attention ranks that share its heads.")
        .def("set_in_flight", [](const Board& b, std::uint32_t n) {
            if (n < 1) throw Error(Code::kConfig, "in_flight must be positive");
            b.header().in_flight.store(n);
        }, "in_flight"_a, "Batches that the attention worker keeps between attention and FFN; 1 is no pipeline.")
        .def("set_turn", &set_turn, "slot"_a, "turn"_a)
        .def("take", [](const Board& b, std::int64_t s) { check_index(s, b.shape().slots, "slot"); return b.take(s); }, "slot"_a, "Take a ready slot back for the host; False when it is not ready or was just started.")
        .def("turn", [](const Board& b, std::int64_t s) { check_index(s, b.shape().slots, "slot"); return static_cast<std::uint32_t>(b.slot(s).turn.load(std::memory_order_acquire)); }, "slot"_a)
        .def("set_layer", [](const Board& b, std::int64_t s, std::int32_t layer) { check_index(s, b.shape().slots, "slot"); b.slot(s).layer = layer; b.slot(s).arrived.store(0); }, "slot"_a, "layer"_a, "Before a stage that the host names.")
        .def("arrived", [](const Board& b, std::int64_t s) { check_index(s, b.shape().slots, "slot"); return b.slot(s).arrived.load(std::memory_order_acquire); }, "slot"_a, "Bits of attention ranks that are done with a slot in this turn.")
        .def("layer", [](const Board& b, std::int64_t s) { check_index(s, b.shape().slots, "slot"); return b.slot(s).layer; }, "slot"_a)
        .def("call", [](const Board& b, std::int64_t s) { check_index(s, b.shape().slots, "slot"); b.slot(s).called.store(1, std::memory_order_release); }, "slot"_a, "Ask for a slot at its next token boundary.")
        .def("position", [](const Board& b, std::int64_t s) { check_index(s, b.shape().seats, "seat"); return b.seat(s).position.load(std::memory_order_acquire); }, "seat"_a)
        .def("finish", [](const Board& b, std::int64_t s) { check_index(s, b.shape().seats, "seat"); return static_cast<std::uint32_t>(b.seat(s).finish.load(std::memory_order_acquire)); }, "seat"_a)
        .def("tokens", [](const Board& b, std::int64_t s) { return copy_of(known_tokens(b, s)); }, "seat"_a)
        .def("stamps", [](const Board& b, std::int64_t s) { return copy_of(b.stamps(s).first(known_tokens(b, s).size())); }, "seat"_a, "When each drawn token was known, ns.")
        .def("events", &events_of, "worker"_a, "Stages a worker ran, [n, 6]: start and end in ns, slot, model, layer, rows. FFN rank r is worker 8 + r.")
        .def("bell", [](const Board& b) { return b.header().host.rung.load(std::memory_order_acquire); }, "The host's bell, to pass to rest().")
        .def("rest", [](const Board& b, std::uint32_t seen, std::int64_t timeout_ms) { b.header().host.sleep(seen, timeout_ms); }, "seen"_a, "timeout_ms"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("ring", [](const Board& b) { b.header().host.ring(); })
        .def("abort", &Board::abort);
}

}  // namespace

void register_link(nb::module_& m) {
    using decode::HiddenLink;
    const auto released = nb::call_guard<nb::gil_scoped_release>();
    nb::class_<HiddenLink>(m, "HiddenLink", "Slots of one FFN rank over a connected socket, which the link owns.")
        .def("__init__", [](HiddenLink* self, const Board& board, int fd, int rank, bool at_ffn) {
            new (self) HiddenLink(board, fd, rank, at_ffn ? decode::LinkEnd::kFfn : decode::LinkEnd::kAttention);
        }, "board"_a, "fd"_a, "rank"_a, "at_ffn"_a, nb::keep_alive<1, 2>())
        .def("send", &HiddenLink::send, released)
        .def("receive", &HiddenLink::receive, released)
        .def("step", &HiddenLink::step, "slot"_a, released)
        .def("shut", &HiddenLink::shut);
}

void register_workers(nb::module_& m) {
    register_board(m);
    register_link(m);
    using decode::AttentionWorker;
    using decode::FfnWorker;
    const auto released = nb::call_guard<nb::gil_scoped_release>();
    nb::class_<AttentionWorker>(m, "AttentionWorker", "The KV side's worker; one thread runs it.")
        .def(nb::init<const Board&, int>(), "board"_a, "rank"_a = 0, nb::keep_alive<1, 2>())
        .def("activate", [](AttentionWorker& self, std::int64_t model, Attention& stack, const Kv& kv) { self.activate(model, &stack.stack, kv.view); },
             "model"_a, "stack"_a, "kv"_a, "The caller keeps stack and KV alive until it deactivates the model.")
        .def("deactivate", &AttentionWorker::deactivate, "model"_a)
        .def("run", &AttentionWorker::run, released)
        .def("step", &AttentionWorker::step, "slot"_a, released)
        .def_prop_ro("stages", &AttentionWorker::stages);
    nb::class_<FfnWorker>(m, "FfnWorker", "One rank of the weights pool; one thread runs it.")
        .def(nb::init<const Board&, int>(), "board"_a, "rank"_a, nb::keep_alive<1, 2>())
        .def("activate", [](FfnWorker& self, std::int64_t model, Ffn& stack, Ids places) { self.activate(model, &stack.stack, std::move(places)); },
             "model"_a, "stack"_a, "places"_a, "The caller keeps the stack alive until it deactivates the model.")
        .def("deactivate", &FfnWorker::deactivate, "model"_a)
        .def("run", &FfnWorker::run, released)
        .def("step", &FfnWorker::step, "slot"_a, released)
        .def_prop_ro("stages", &FfnWorker::stages);
}

}  // namespace poolweave::bindings
