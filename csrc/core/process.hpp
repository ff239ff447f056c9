// Which process it is: a pid and its start time, so that a reused pid is not taken for the one that died.
#pragma once

#include <cstdint>

namespace poolweave {

struct ProcessId {
    std::int64_t pid = 0;
    std::uint64_t start_ticks = 0;  // field 22 of /proc/<pid>/stat
};

ProcessId current_process();

// False once the process is gone or a zombie. True when /proc cannot be read but the pid exists.
bool is_alive(const ProcessId& process);

}  // namespace poolweave
