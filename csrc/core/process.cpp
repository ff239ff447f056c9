#include "core/process.hpp"

#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace poolweave {
namespace {

struct Stat {
    bool readable = false;
    char state = '?';
    std::uint64_t start_ticks = 0;
};

// /proc/<pid>/stat: "pid (comm) S ppid ..."; comm may hold spaces and brackets, so fields count from the last ')'.
Stat read_stat(std::int64_t pid) {
    const std::string path = "/proc/" + std::to_string(pid) + "/stat";
    std::FILE* file = std::fopen(path.c_str(), "re");
    if (file == nullptr) return {};
    char text[1024];
    const std::size_t length = std::fread(text, 1, sizeof text - 1, file);
    std::fclose(file);
    text[length] = '\0';
    const char* cursor = std::strrchr(text, ')');
    if (cursor == nullptr || cursor[1] != ' ') return {};
    Stat stat;
    stat.readable = true;
    stat.state = cursor[2];
    cursor += 2;  // at field 3
    for (int field = 3; field < 22; ++field) {
        cursor = std::strchr(cursor, ' ');
        if (cursor == nullptr) return {};
        ++cursor;
    }
    stat.start_ticks = std::strtoull(cursor, nullptr, 10);
    return stat;
}

}  // namespace

ProcessId current_process() {
    const std::int64_t pid = getpid();
    return {pid, read_stat(pid).start_ticks};
}

bool is_alive(const ProcessId& process) {
    const Stat stat = read_stat(process.pid);
    if (!stat.readable) return kill(static_cast<pid_t>(process.pid), 0) == 0 || errno == EPERM;
    return stat.state != 'Z' && stat.state != 'X' && stat.start_ticks == process.start_ticks;
}

}  // namespace poolweave
