// From (parent, first block) to the child: open addressing over 32-bit hashes. A hash only picks the bucket; who
// looks up compares tokens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace poolweave {

class ChildTable {
  public:
    struct Entry {
        std::uint32_t hash;
        std::uint32_t value;  // 0 = empty
    };

    // The first entry of this hash for which `accept(value)` holds, or nullptr.
    template <class Accept>
    Entry* find(std::uint32_t hash, Accept&& accept) noexcept {
        return const_cast<Entry*>(std::as_const(*this).find(hash, accept));
    }
    template <class Accept>
    const Entry* find(std::uint32_t hash, Accept&& accept) const noexcept {
        if (entries_.empty()) return nullptr;
        for (std::size_t i = hash & mask(); entries_[i].value != 0; i = (i + 1) & mask()) {
            if (entries_[i].hash == hash && accept(entries_[i].value)) return &entries_[i];
        }
        return nullptr;
    }

    // Makes room for `count` more entries, so that insert() cannot fail. Throws bad_alloc and then changes nothing.
    void reserve(std::size_t count) {
        if (!must_grow(count)) return;
        std::vector<Entry> old(next_capacity(count), Entry{0, 0});
        old.swap(entries_);
        for (const Entry& entry : old) {
            if (entry.value != 0) place(entry);
        }
    }

    void insert(std::uint32_t hash, std::uint32_t value) noexcept {
        place(Entry{hash, value});
        ++size_;
    }

    // Removes an entry that find() gave; moves later entries of its cluster back, so no tombstones are left.
    void erase(const Entry* entry) noexcept {
        std::size_t hole = static_cast<std::size_t>(entry - entries_.data());
        for (std::size_t i = (hole + 1) & mask(); entries_[i].value != 0; i = (i + 1) & mask()) {
            const std::size_t home = entries_[i].hash & mask();
            if (((i - home) & mask()) >= ((i - hole) & mask())) {
                entries_[hole] = entries_[i];
                hole = i;
            }
        }
        entries_[hole] = Entry{0, 0};
        --size_;
    }

    void prefetch(std::uint32_t hash) const noexcept {
        if (!entries_.empty()) __builtin_prefetch(&entries_[hash & mask()]);
    }

    // The same table as a counter of hashes: one more, after reserve(1), or one less of `hash`.
    void count(std::uint32_t hash) noexcept {
        if (Entry* entry = find(hash, any)) {
            ++entry->value;
        } else {
            insert(hash, 1);
        }
    }
    void uncount(std::uint32_t hash) noexcept {
        Entry* entry = find(hash, any);
        if (--entry->value == 0) erase(entry);
    }
    bool contains(std::uint32_t hash) const noexcept { return find(hash, any) != nullptr; }

    std::size_t size() const noexcept { return size_; }
    std::size_t nbytes() const noexcept { return entries_.size() * sizeof(Entry); }
    // What reserve(count) adds while both the old and the new table exist.
    std::size_t growth_bytes(std::size_t count) const noexcept {
        return must_grow(count) ? next_capacity(count) * sizeof(Entry) : 0;
    }

  private:
    static bool any(std::uint32_t) noexcept { return true; }
    std::size_t mask() const noexcept { return entries_.size() - 1; }
    bool must_grow(std::size_t count) const noexcept { return (size_ + count) * 4 > entries_.size() * 3; }
    std::size_t next_capacity(std::size_t count) const noexcept {
        std::size_t capacity = entries_.empty() ? 16 : entries_.size();
        while ((size_ + count) * 4 > capacity * 3) capacity *= 2;
        return capacity;
    }
    void place(Entry entry) noexcept {
        std::size_t i = entry.hash & mask();
        while (entries_[i].value != 0) i = (i + 1) & mask();
        entries_[i] = entry;
    }

    std::vector<Entry> entries_;
    std::size_t size_ = 0;
};

}  // namespace poolweave
