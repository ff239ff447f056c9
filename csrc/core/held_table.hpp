// What one source holds: from the 64-bit hash by which it calls a block to that block. Open addressing, 16 bytes an entry.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/kv_events.hpp"
#include "core/page_array.hpp"

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
        Entry& entry = slot_of(hash);
        return entry.block == 0 ? nullptr : &entry;
    }

    // Makes room for `count` more. Throws bad_alloc and then changes nothing.
    void reserve(std::size_t count) {
        std::size_t capacity = entries_.empty() ? kLeast : entries_.size();
        while ((size_ + count) * 4 > capacity * 3) capacity *= 2;
        if (capacity == entries_.size()) return;
        PageArray<Entry> old(capacity, true);
        old.swap(entries_);
        for (const Entry& entry : old) {
            if (entry.block != 0) slot_of(entry.hash) = entry;
        }
    }

    // The entry of `hash`, or, after reserve(1), the place for a new one: it has no block until settle() names one.
    Entry& claim(std::uint64_t hash) noexcept { return slot_of(hash); }
    void settle(Entry& place, std::uint64_t hash, std::uint32_t block) noexcept {
        place = Entry{hash, block, {}};
        ++size_;
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
        entries_ = PageArray<Entry>();
        size_ = 0;
    }
    std::size_t size() const noexcept { return size_; }
    std::size_t nbytes() const noexcept { return entries_.nbytes(); }

  private:
    static constexpr std::size_t kLeast = 256;  // entries: a page

    std::size_t mask() const noexcept { return entries_.size() - 1; }
    // Publishers' hashes need not be uniform: mixed before their bits are used.
    std::size_t home(std::uint64_t hash) const noexcept { return (hash * 0x9E3779B97F4A7C15u >> 20) & mask(); }
    Entry& slot_of(std::uint64_t hash) noexcept {
        std::size_t i = home(hash);
        while (entries_[i].block != 0 && entries_[i].hash != hash) i = (i + 1) & mask();
        return entries_[i];
    }

    PageArray<Entry> entries_;
    std::size_t size_ = 0;
};

}  // namespace poolweave
