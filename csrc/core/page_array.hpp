// Zeroed memory for large tables, straight from the system: a page is taken when it is first written, and nothing is
// kept when the table goes. Large pages, where the system gives them, spare most of the faults and TLB misses.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <new>
#include <type_traits>
#include <utility>

namespace poolweave {

template <class T>
class PageArray {
    static_assert(std::is_trivially_copyable_v<T>);

  public:
    PageArray() = default;

    // Throws bad_alloc. Ask for `large` pages only where all of it will be written soon.
    PageArray(std::size_t count, bool large) : size_(count) {
        const std::size_t margin = large && nbytes() >= kLargePage ? kLargePage : 0;
        void* mapped = mmap(nullptr, nbytes() + margin, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (mapped == MAP_FAILED) throw std::bad_alloc();
        mapped_ = {mapped, nbytes() + margin};
        data_ = static_cast<T*>(mapped);
        if (margin == 0) return;
        const auto address = reinterpret_cast<std::uintptr_t>(mapped);
        data_ = reinterpret_cast<T*>((address + kLargePage - 1) / kLargePage * kLargePage);
        madvise(data_, nbytes(), MADV_HUGEPAGE);  // a wish: without such pages it works as well
    }

    PageArray(PageArray&& other) noexcept { swap(other); }
    PageArray& operator=(PageArray&& other) noexcept {
        PageArray moved(std::move(other));
        swap(moved);
        return *this;
    }
    ~PageArray() {
        if (mapped_.second != 0) munmap(mapped_.first, mapped_.second);
    }

    T& operator[](std::size_t i) const noexcept { return data_[i]; }
    T* data() const noexcept { return data_; }
    T* begin() const noexcept { return data_; }
    T* end() const noexcept { return data_ + size_; }
    std::size_t size() const noexcept { return size_; }
    bool empty() const noexcept { return size_ == 0; }
    std::size_t nbytes() const noexcept { return size_ * sizeof(T); }

    void swap(PageArray& other) noexcept {
        std::swap(mapped_, other.mapped_);
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
    }

  private:
    static constexpr std::size_t kLargePage = 2 << 20;

    std::pair<void*, std::size_t> mapped_{nullptr, 0};
    T* data_ = nullptr;
    std::size_t size_ = 0;
};

}  // namespace poolweave
