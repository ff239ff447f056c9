// What one source holds: from the 64-bit hash by which it calls a block to that block. Open addressing, 16 bytes an entry.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/kv_events.hpp"

namespace poolweave {

class HeldTable {
  public:
    struct Entry {
        std::uint64_t hash = 0;
        std::uint32_t block = 0;              // 0 = empty
        std::uint8_t copies[kMedia] = {};     // times stored and not removed, by medium; saturating
    };

    Entry* find(std::uint64_t hash) noexcept {
        if (entries_.empty()) return nullptr;
        for (std::size_t i = home(hash);; i = (i + 1) & mask()) {
            if (entries_[i].block == 0) return nullptr;
            if (entries_[i].hash == hash) return &entries_[i];
        }
    }

    // Makes room for `count` more. Throws bad_alloc and then changes nothing.
    void reserve(std::size_t count) {
        std::size_t capacity = entries_.empty() ? 16 : entries_.size();
        while ((size_ + count) * 4 > capacity * 3) capacity *= 2;
        if (capacity == entries_.size()) return;
        std::vector<Entry> old(capacity);
        old.swap(entries_);
        for (const Entry& entry : old) {
            if (entry.block != 0) place(entry);
        }
    }

    Entry& insert(std::uint64_t hash, std::uint32_t block) noexcept {
        ++size_;
        return place(Entry{hash, block, {}});
    }

    void erase(const Entry* entry) noexcept {
        std::size_t hole = static_cast<std::size_t>(entry - entries_.data());
        for (std::size_t i = (hole + 1) & mask(); entries_[i].block != 0; i = (i + 1) & mask()) {
            if (((i - home(entries_[i].hash)) & mask()) < ((i - hole) & mask())) continue;
            entries_[hole] = entries_[i];
            hole = i;
        }
        entries_[hole] = Entry{};
        --size_;
    }

    void prefetch(std::uint64_t hash) const noexcept {
        if (!entries_.empty()) __builtin_prefetch(&entries_[home(hash)]);
    }

    template <class Visit>
    void each(Visit&& visit) const {
        for (const Entry& entry : entries_) {
            if (entry.block != 0) visit(entry);
        }
    }

    void clear() noexcept {
        entries_ = {};
        size_ = 0;
    }
    std::size_t size() const noexcept { return size_; }
    std::size_t nbytes() const noexcept { return entries_.size() * sizeof(Entry); }

  private:
    std::size_t mask() const noexcept { return entries_.size() - 1; }
    // Publishers' hashes need not be uniform: mixed before their bits are used.
    std::size_t home(std::uint64_t hash) const noexcept { return (hash * 0x9E3779B97F4A7C15u >> 20) & mask(); }
    Entry& place(const Entry& entry) noexcept {
        std::size_t i = home(entry.hash);
        while (entries_[i].block != 0) i = (i + 1) & mask();
        return entries_[i] = entry;
    }

    std::vector<Entry> entries_;
    std::size_t size_ = 0;
};

}  // namespace poolweave
