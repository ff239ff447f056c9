// Who keeps an arena's pages in memory, so that they are never swapped and a device may read them by itself.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace poolweave {

class Pinner {
  public:
    Pinner() = default;
    Pinner(const Pinner&) = delete;
    Pinner& operator=(const Pinner&) = delete;
    virtual ~Pinner() = default;

    // What came of it: nothing pinned where `why` says something, and then what the limit is and what to do.
    struct Result {
        std::string why;
        std::string advice;
        std::int64_t limit = 0;
    };
    virtual Result pin(std::byte* at, std::uint64_t nbytes) = 0;
    // Before the page at `at`, which was pinned, is unmapped.
    virtual void unpin(std::byte* at) noexcept = 0;
};

// mlock: unmapping ends it.
class MemoryLock : public Pinner {
  public:
    Result pin(std::byte* at, std::uint64_t nbytes) override;
    void unpin(std::byte*) noexcept override {}
};

}  // namespace poolweave
