// The one exception type of the core: a code that the bindings map to a Python class, and the numbers it carries.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace poolweave {

enum class Code {
    kConfig,        // a setting or argument out of its range
    kOutOfBlocks,   // needed, free, evictable, pinned
    kOutOfPages,    // needed, free, budget (pages)
    kUnknownBlock,  // a handle that was never given out
    kStaleHandle,   // a handle whose block has been freed since
    kNotResident,   // the block lies in another tier
    kNotSealed,     // the block's producer has not finished
    kPrivate,       // the block is its receiver's alone
    kTransfer,      // bytes did not arrive whole
    kProtocol,      // a peer's bytes are not this protocol; numbers = {nbytes, limit}
    kOs,            // a system call failed; numbers = {errno}
    kClosed,        // the object was closed before
    kMalformed,     // bytes from outside that make no sense; numbers = {offset}
};

class Error : public std::runtime_error {
  public:
    Error(Code code, const std::string& message, std::vector<std::int64_t> numbers = {})
        : std::runtime_error(message), code_(code), numbers_(std::move(numbers)) {}

    Code code() const noexcept { return code_; }
    const std::vector<std::int64_t>& numbers() const noexcept { return numbers_; }

  private:
    Code code_;
    std::vector<std::int64_t> numbers_;
};

}  // namespace poolweave
