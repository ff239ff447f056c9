// Binding of the radix tree; see csrc/core/radix_tree.hpp.
//
// Most calls are a few microseconds: they keep the GIL while nobody holds the tree's lock and the work is short, and
// otherwise let go of it before they wait or walk.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <deque>

#include "bindings/array_arg.hpp"
#include "bindings/radix_results.hpp"
#include "bindings/registry.hpp"
#include "core/radix_tree.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace poolweave::bindings {

namespace {

constexpr std::size_t kLongPrompt = 32 << 10;  // tokens: about 20 us out of cold memory
constexpr std::size_t kManyBlocks = 256;       // blocks: about 20 us to give up

bool must_release(const RadixTree& tree, Tokens tokens) { return tokens.size() > kLongPrompt || !tree.idle(); }

MatchResult match(nb::handle self, nb::handle array, std::uint32_t ns, bool pin, bool touch, std::int64_t now_ns) {
    auto& tree = nb::cast<RadixTree&>(self);
    const TokensArg arg(array);
    const Tokens tokens = arg.span();
    const Lookup how{.now_ns = now_ns, .pin = pin, .touch = touch};
    Match found = without_gil(must_release(tree, tokens), [&] { return tree.match(tokens, ns, how); });
    return {std::move(found), pin ? nb::borrow(self) : nb::object()};
}

nb::list match_many(RadixTree& tree, nb::list prompts, std::uint32_t ns, bool touch, std::int64_t now_ns) {
    std::deque<TokensArg> args;
    for (nb::handle prompt : prompts) args.emplace_back(prompt);
    std::vector<Match> found;
    found.reserve(args.size());
    without_gil(true, [&] {
        for (const TokensArg& arg : args) found.push_back(tree.match(arg.span(), ns, {now_ns, false, touch}));
    });
    nb::list results;
    for (Match& one : found) results.append(nb::cast(MatchResult(std::move(one), nb::object())));
    return results;
}

Inserted insert(RadixTree& tree, nb::handle token_array, nb::handle payload_array, std::uint32_t ns, std::uint8_t priority,
                std::int64_t now_ns) {
    const TokensArg tokens(token_array);
    const PayloadsArg payloads(payload_array);
    const Storing how{.now_ns = now_ns, .priority = priority};
    return without_gil(must_release(tree, tokens.span()),
                       [&] { return tree.insert(tokens.span(), payloads.span(), ns, how); });
}

nb::object remove(RadixTree& tree, nb::handle array, std::uint32_t ns, const Evictable* filter) {
    const TokensArg tokens(array);
    return to_array(without_gil(must_release(tree, tokens.span()), [&] { return tree.remove(tokens.span(), ns, filter); }));
}

void mark(RadixTree& tree, nb::handle array, std::uint32_t ns, MissReason reason) {
    const TokensArg tokens(array);
    without_gil(must_release(tree, tokens.span()), [&] { tree.mark(tokens.span(), ns, reason); });
}

void register_prompts(nb::class_<RadixTree>& cls) {
    cls.def("match", &match, "tokens"_a, "ns"_a = 0, "pin"_a = false, "touch"_a = true, "now_ns"_a = 0,
            nb::sig("def match(self, tokens: NDArray[numpy.int32], ns: int = 0, pin: bool = False, touch: bool = True, "
                    "now_ns: int = 0) -> Match"))
        .def("match_many", &match_many, "prompts"_a, "ns"_a = 0, "touch"_a = true, "now_ns"_a = 0,
             nb::sig("def match_many(self, prompts: list[NDArray[numpy.int32]], ns: int = 0, touch: bool = True, "
                     "now_ns: int = 0) -> list[Match]"))
        .def("insert", &insert, "tokens"_a, "payloads"_a, "ns"_a = 0, "priority"_a = 0, "now_ns"_a = 0,
             nb::sig("def insert(self, tokens: NDArray[numpy.int32], payloads: NDArray[numpy.uint64], ns: int = 0, "
                     "priority: int = 0, now_ns: int = 0) -> Inserted"))
        .def("delete", &remove, "tokens"_a, "ns"_a = 0, "filter"_a = nb::none(),
             nb::sig("def delete(self, tokens: NDArray[numpy.int32], ns: int = 0, filter: EvictFilter | None = None) "
                     "-> NDArray[numpy.uint64]"),
             "Blocks that only this prompt needs, given up from its end upward; pinned and not evictable ones stay.")
        .def("mark", &mark, "tokens"_a, "ns"_a, "reason"_a,
             nb::sig("def mark(self, tokens: NDArray[numpy.int32], ns: int, reason: MissReason) -> None"),
             "Later misses at blocks of this prompt report this reason.");
}

void register_order(nb::class_<RadixTree>& cls) {
    cls.def("evict", [](RadixTree& self, std::size_t n, const Evictable* filter) {
           return to_array(without_gil(n > kManyBlocks || !self.idle(), [&] { return self.evict(n, filter); }));
       }, "num_blocks"_a, "filter"_a = nb::none(),
       nb::sig("def evict(self, num_blocks: int, filter: EvictFilter | None = None) -> NDArray[numpy.uint64]"),
       "Up to num_blocks payloads given up, lowest priority first, in the policy's order, leaves from their ends.")
        .def("coldest", [](const RadixTree& self, std::size_t n, const Evictable* filter) {
            return to_array(without_gil(n > kManyBlocks || !self.idle(), [&] { return self.coldest(n, filter); }));
        }, "num_blocks"_a, "filter"_a = nb::none(),
        nb::sig("def coldest(self, num_blocks: int, filter: EvictFilter | None = None) -> NDArray[numpy.uint64]"),
        "The payloads that evict would come to first; nothing is removed.")
        .def("evict_tenant", [](RadixTree& self, std::uint32_t ns, std::size_t n, const Evictable* filter) {
            return to_array(without_gil(n > kManyBlocks || !self.idle(), [&] { return self.evict_tenant(ns, n, filter); }));
        }, "ns"_a, "num_blocks"_a, "filter"_a = nb::none(),
        nb::sig("def evict_tenant(self, ns: int, num_blocks: int, filter: EvictFilter | None = None) -> NDArray[numpy.uint64]"),
        "evict() among the blocks of the tenant of `ns`, least recently used first.")
        .def("coldest_tenant", [](const RadixTree& self, std::uint32_t ns, std::size_t n, const Evictable* filter) {
            return to_array(without_gil(n > kManyBlocks || !self.idle(), [&] { return self.coldest_tenant(ns, n, filter); }));
        }, "ns"_a, "num_blocks"_a, "filter"_a = nb::none(),
        nb::sig("def coldest_tenant(self, ns: int, num_blocks: int, filter: EvictFilter | None = None) -> NDArray[numpy.uint64]"),
        "coldest() among the blocks of the tenant of `ns`, least recently used first.")
        .def("expire", [](RadixTree& self, std::int64_t now_ns) {
            return to_array(without_gil(true, [&] { return self.expire(now_ns); }));
        }, "now_ns"_a, nb::sig("def expire(self, now_ns: int) -> NDArray[numpy.uint64]"),
        "Payloads that were not touched for the time to live.")
        .def("clear", [](RadixTree& self, std::uint32_t ns, MissReason reason) {
            return to_array(without_gil(true, [&] { return self.clear(ns, reason); }));
        }, "ns"_a, "reason"_a, nb::sig("def clear(self, ns: int, reason: MissReason) -> NDArray[numpy.uint64]"),
        "Everything of one namespace that is not pinned.")
        .def("clear_all", [](RadixTree& self, MissReason reason) {
            return to_array(without_gil(true, [&] { return self.clear_all(reason); }));
        }, "reason"_a, nb::sig("def clear_all(self, reason: MissReason) -> NDArray[numpy.uint64]"),
        "Everything that is not pinned.");
}

}  // namespace

void register_radix(nb::module_& m) {
    register_radix_results(m);
    register_eviction(m);
    nb::class_<RadixTree> cls(m, "RadixTree", "An exact prefix index from int32 tokens to uint64 payloads. Thread-safe.");
    cls.def("__init__", [](RadixTree* self, std::uint32_t block_tokens, std::size_t max_bytes, std::size_t max_tenant_bytes,
                           std::int64_t ttl_ns, std::uint64_t seed, std::string eviction, const RecomputeCost* cost, bool keep_tenants) {
           new (self) RadixTree({block_tokens, max_bytes, max_tenant_bytes, keep_tenants, ttl_ns, seed, std::move(eviction),
                                cost == nullptr ? RecomputeCost{} : *cost});
       }, "block_tokens"_a = 16, nb::kw_only(), "max_bytes"_a = 0, "max_tenant_bytes"_a = 0, "ttl_ns"_a = 0, "seed"_a = 0,
            "eviction"_a = "lru", "cost"_a = nb::none(), "keep_tenants"_a = false)
        .def_prop_ro("eviction", &RadixTree::eviction, "The name of the policy.")
        .def("set_tenant", &RadixTree::set_tenant, "ns"_a, "tenant"_a)
        .def("forget", [](RadixTree& self, const std::vector<std::uint32_t>& namespaces) { return self.forget(namespaces); },
             "namespaces"_a, nb::call_guard<nb::gil_scoped_release>(), "Those of these that hold nothing; nothing is kept of them.")
        .def("tenant_bytes", &RadixTree::tenant_bytes, "ns"_a)
        .def("stats", &RadixTree::stats, nb::call_guard<nb::gil_scoped_release>())
        .def("check", &RadixTree::check, nb::call_guard<nb::gil_scoped_release>(),
             "What is wrong with the tree's invariants; empty when nothing is. O(tree).")
        .def_prop_ro("block_tokens", &RadixTree::block_tokens)
        .def("__len__", &RadixTree::num_blocks, "Blocks indexed.");
    register_prompts(cls);
    register_order(cls);
}

}  // namespace poolweave::bindings
