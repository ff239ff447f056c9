#include "core/abort.hpp"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>

#include "core/error.hpp"

namespace poolweave {

Abort::Abort() : fd_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (fd_ < 0) {
        throw Error(Code::kOs, std::string("eventfd: ") + std::strerror(errno) + "; raise the limit of open files", {errno});
    }
}

Abort::~Abort() { ::close(fd_); }

void Abort::set() noexcept {
    if (flag_.exchange(true, std::memory_order_acq_rel)) return;
    const std::uint64_t one = 1;
    // A counter that was never read cannot overflow, so the write can only succeed.
    [[maybe_unused]] const auto written = ::write(fd_, &one, sizeof one);
}

}  // namespace poolweave
