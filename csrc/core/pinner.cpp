#include "core/pinner.hpp"

#include <sys/mman.h>
#include <sys/resource.h>

#include <cerrno>
#include <cstring>

namespace poolweave {

Pinner::Result MemoryLock::pin(std::byte* at, std::uint64_t nbytes) {
    if (mlock(at, nbytes) == 0) return {};
    const int number = errno;
    munlock(at, nbytes);  // what was locked before it failed
    struct rlimit limit {};
    getrlimit(RLIMIT_MEMLOCK, &limit);
    return {std::strerror(number), "RLIMIT_MEMLOCK is " + std::to_string(limit.rlim_cur) + "; raise it (`ulimit -l`)",
            static_cast<std::int64_t>(limit.rlim_cur)};
}

}  // namespace poolweave
