// The Python side of what the radix tree returns: native objects whose lists are read-only numpy views.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <memory>
#include <optional>
#include <utility>

#include "core/radix_tree.hpp"

namespace poolweave::bindings {

using PayloadView = nanobind::ndarray<nanobind::numpy, const std::uint64_t, nanobind::ndim<1>>;

// Runs `call`, without the GIL if `release`.
template <class Call>
auto without_gil(bool release, Call&& call) {
    std::optional<nanobind::gil_scoped_release> released;
    if (release) released.emplace();
    return call();
}

// A list as an array that owns it.
template <class T>
nanobind::object to_array(std::vector<T>&& list) {
    using Array = nanobind::ndarray<nanobind::numpy, T, nanobind::ndim<1>>;
    auto kept = std::make_unique<std::vector<T>>(std::move(list));
    std::vector<T>& items = *kept;
    nanobind::capsule owner(kept.release(), [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
    return nanobind::cast(Array(items.data(), {items.size()}, owner));
}

// A match; when pinned it keeps its tree and path until it is closed or collected.
class MatchResult {
  public:
    MatchResult(Match&& match, nanobind::object tree) : match_(std::move(match)), tree_(std::move(tree)) {}
    MatchResult(MatchResult&& other) noexcept : match_(std::move(other.match_)), tree_(std::move(other.tree_)) {
        other.match_.pinned = kNoNode;
    }
    MatchResult& operator=(MatchResult&&) = delete;
    ~MatchResult() { close(); }

    void close() {
        const NodeId pinned = std::exchange(match_.pinned, kNoNode);
        if (pinned == kNoNode) return;
        auto& tree = nanobind::cast<RadixTree&>(tree_);
        without_gil(!tree.idle(), [&] { tree.unpin(pinned); });
    }

    const Match& match() const noexcept { return match_; }

  private:
    Match match_;
    nanobind::object tree_;  // of pinned results only
};

void register_radix_results(nanobind::module_& m);

}  // namespace poolweave::bindings
