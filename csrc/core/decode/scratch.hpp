// Working memory of the executors: floats that begin on a cache line, so that no vector of the widest kind lies on two.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

namespace poolweave::decode {

template <class T>
struct OnLines {
    using value_type = T;

    OnLines() = default;
    template <class Other>
    explicit OnLines(const OnLines<Other>&) noexcept {}

    T* allocate(std::size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), kLine)); }
    void deallocate(T* memory, std::size_t) noexcept { ::operator delete(memory, kLine); }
    bool operator==(const OnLines&) const = default;

  private:
    static constexpr std::align_val_t kLine{64};
};

using Scratch = std::vector<float, OnLines<float>>;

// At least `numbers` of them; what was in it may be lost.
inline float* sized(Scratch& scratch, std::int64_t numbers) {
    if (scratch.size() < static_cast<std::size_t>(numbers)) scratch.resize(static_cast<std::size_t>(numbers));
    return scratch.data();
}

}  // namespace poolweave::decode
