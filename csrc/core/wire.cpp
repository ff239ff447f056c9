#include "core/wire.hpp"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <string>

#include "core/error.hpp"

namespace poolweave {
namespace {

constexpr std::size_t kMaxPieces = 256;  // iovecs a call: IOV_MAX is 1024, but a call moves a few hundred KiB at most

// Bytes a send: between two the kernel takes in the acknowledgments that came meanwhile. At 1 MiB a transfer between two
// processes takes a tenth more processor time, at 64 KiB a third more (benchmarks/bench_transfer_speed.py, a and b).
constexpr std::uint64_t kSentAtOnce = 160u << 10;

// Calls block so long, then the wait goes on where it can be aborted: while bytes flow that spares a poll for each piece.
constexpr std::chrono::microseconds kBrief{10'000};

[[noreturn]] void fail(const std::string& what) { throw Error(Code::kTransfer, what); }

// The iovecs of stream bytes [offset, offset + nbytes), as many as fit; returns the bytes they cover.
std::uint64_t pieces_of(const Extents& extents, std::uint64_t offset, std::uint64_t nbytes, std::span<iovec> out,
                        std::size_t& used) {
    std::size_t block = static_cast<std::size_t>(offset / extents.block_bytes());
    std::uint64_t skip = offset - block * extents.block_bytes();
    std::uint64_t covered = 0;
    for (; covered < nbytes && used < out.size(); ++block) {
        for (const Run& run : extents.runs_of(block)) {
            if (skip >= run.nbytes) {
                skip -= run.nbytes;
                continue;
            }
            const std::uint64_t n = std::min(run.nbytes - skip, nbytes - covered);
            const auto address = static_cast<std::uintptr_t>(run.address + skip);
            skip = 0;
            covered += n;
            iovec* const last = used > 0 ? &out[used - 1] : nullptr;
            if (last != nullptr && reinterpret_cast<std::uintptr_t>(last->iov_base) + last->iov_len == address) {
                last->iov_len += n;
            } else {
                out[used++] = {reinterpret_cast<void*>(address), static_cast<std::size_t>(n)};
            }
            if (covered == nbytes || used == out.size()) break;
        }
    }
    return covered;
}

}  // namespace

Wire::Wire(int fd) : fd_(fd) {
    const int flags = ::fcntl(fd, F_GETFL);
    const timeval brief{0, kBrief.count()};
    if (flags < 0 || ::fcntl(fd, F_SETFL, flags & ~O_NONBLOCK) < 0 || ::setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &brief, sizeof brief) < 0 ||
        ::setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &brief, sizeof brief) < 0) {
        const int error = errno;
        ::close(fd);
        throw Error(Code::kOs, std::string("settings of a data connection: ") + std::strerror(error), {error});
    }
    const int one = 1;  // fails on Unix sockets, where nothing is delayed
    ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
}

Wire::~Wire() { ::close(fd_); }

void Wire::shut_down() noexcept { ::shutdown(fd_, SHUT_RDWR); }

void Wire::wait(short events, const Patience& patience) {
    const auto now = Clock::now();
    const auto until = std::min(now + patience.stall, patience.deadline);
    std::array<pollfd, 2> watched{pollfd{fd_, events, 0}, pollfd{-1, POLLIN, 0}};
    if (patience.abort != nullptr) watched[1].fd = patience.abort->fd();
    for (;;) {
        const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()).count();
        if (left <= 0) fail(until == patience.deadline ? "the deadline passed" : "the peer stalled");
        const int ready = ::poll(watched.data(), watched.size(), static_cast<int>(std::min<long long>(left, 1 << 30)));
        if (ready < 0 && errno != EINTR) fail(std::string("poll: ") + std::strerror(errno));
        if (ready <= 0) continue;
        if (watched[1].revents != 0) throw Error(Code::kClosed, "the transfer was aborted");
        return;
    }
}

void Wire::send(std::span<const std::byte> bytes, const Patience& patience) {
    while (!bytes.empty()) {
        const ssize_t n = ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
        if (n >= 0) {
            bytes = bytes.subspan(static_cast<std::size_t>(n));
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            wait(POLLOUT, patience);
        } else if (errno != EINTR) {
            fail(std::string("send: ") + std::strerror(errno));
        }
    }
}

void Wire::send(std::span<const std::byte> head, const Extents& extents, std::uint64_t offset, std::uint64_t nbytes,
                const Patience& patience) {
    std::array<iovec, kMaxPieces> pieces;
    while (!head.empty() || nbytes > 0) {
        std::size_t used = 0;
        if (!head.empty()) pieces[used++] = {const_cast<std::byte*>(head.data()), head.size()};
        if (nbytes > 0) pieces_of(extents, offset, std::min(nbytes, kSentAtOnce), pieces, used);
        msghdr message{};
        message.msg_iov = pieces.data();
        message.msg_iovlen = used;
        const ssize_t n = ::sendmsg(fd_, &message, MSG_NOSIGNAL);
        if (n >= 0) {
            const std::size_t of_head = std::min(static_cast<std::size_t>(n), head.size());
            head = head.subspan(of_head);
            offset += static_cast<std::uint64_t>(n) - of_head;
            nbytes -= static_cast<std::uint64_t>(n) - of_head;
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            wait(POLLOUT, patience);
        } else if (errno != EINTR) {
            fail(std::string("send: ") + std::strerror(errno));
        }
    }
}

void Wire::receive(std::span<std::byte> bytes, const Patience& patience) {
    while (!bytes.empty()) {
        const ssize_t n = ::recv(fd_, bytes.data(), bytes.size(), 0);
        if (n > 0) {
            bytes = bytes.subspan(static_cast<std::size_t>(n));
        } else if (n == 0) {
            fail("the peer closed the connection in the middle of a message");
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            wait(POLLIN, patience);
        } else if (errno != EINTR) {
            fail(std::string("receive: ") + std::strerror(errno));
        }
    }
}

std::uint64_t Wire::receive_some(const Extents& extents, std::uint64_t offset, std::uint64_t nbytes,
                                 const Patience& patience) {
    std::array<iovec, kMaxPieces> pieces;
    std::size_t used = 0;
    pieces_of(extents, offset, nbytes, pieces, used);
    msghdr message{};
    message.msg_iov = pieces.data();
    message.msg_iovlen = used;
    for (;;) {
        if (patience.abort != nullptr && patience.abort->is_set()) throw Error(Code::kClosed, "the transfer was aborted");
        const ssize_t n = ::recvmsg(fd_, &message, 0);
        if (n > 0) return static_cast<std::uint64_t>(n);
        if (n == 0) fail("the peer closed the connection in the middle of a chunk");
        if (errno == EAGAIN || errno == EWOULDBLOCK) {
            wait(POLLIN, patience);
        } else if (errno != EINTR) {
            fail(std::string("receive: ") + std::strerror(errno));
        }
    }
}

bool Wire::wait_readable(const Patience& patience) {
    try {
        wait(POLLIN, patience);
    } catch (const Error&) {
        return false;
    }
    std::byte first;
    return ::recv(fd_, &first, 1, MSG_PEEK | MSG_DONTWAIT) == 1;
}

}  // namespace poolweave
