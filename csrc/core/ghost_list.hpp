// Names of blocks that were given up lately: first in, first out, in memory that never grows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/child_table.hpp"

namespace poolweave {

class GhostList {
  public:
    explicit GhostList(std::size_t capacity) : ring_(capacity) { table_.reserve(capacity); }

    std::size_t size() const noexcept { return size_; }
    std::size_t nbytes() const noexcept { return ring_.size() * sizeof(std::uint64_t) + table_.nbytes(); }

    // At most `most` names are kept, the newest ones.
    void push(std::uint64_t name, std::size_t most) noexcept {
        take(name);
        most = most < ring_.size() ? most : ring_.size();
        while (size_ > 0 && (size_ >= most || end_ - begin_ >= ring_.size())) drop_oldest();
        if (most == 0) return;
        if (size_ == 0) begin_ = end_ = 0;
        name = name == kNoName ? 1 : name;
        ring_[end_ % ring_.size()] = name;
        table_.insert(hash(name), static_cast<std::uint32_t>(end_ % ring_.size()) + 1);
        ++end_;
        ++size_;
    }

    // True when `name` was in; it is not any more.
    bool take(std::uint64_t name) noexcept {
        name = name == kNoName ? 1 : name;
        const auto* entry = table_.find(hash(name), [&](std::uint32_t place) { return ring_[place - 1] == name; });
        if (entry == nullptr) return false;
        ring_[entry->value - 1] = kNoName;
        table_.erase(entry);
        --size_;
        return true;
    }

  private:
    static constexpr std::uint64_t kNoName = 0;  // of a place whose name was taken
    static std::uint32_t hash(std::uint64_t name) noexcept { return static_cast<std::uint32_t>(name >> 16); }

    void drop_oldest() noexcept {
        const std::size_t place = begin_++ % ring_.size();
        if (ring_[place] != kNoName) take(ring_[place]);
    }

    std::vector<std::uint64_t> ring_;
    ChildTable table_;  // hash of a name -> its place + 1
    std::size_t begin_ = 0;
    std::size_t end_ = 0;
    std::size_t size_ = 0;
};

}  // namespace poolweave
