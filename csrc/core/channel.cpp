#include "core/channel.hpp"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "core/error.hpp"

namespace poolweave {
namespace {

constexpr std::size_t kReadBytes = 256u << 10;
constexpr std::size_t kMostReady = 64;

[[noreturn]] void lost(const char* what, int error) {
    throw Error(Code::kOs, std::string(what) + ": " + std::strerror(error), {error});
}

}  // namespace

Channel::Channel(int fd, FrameKey key) : fd_(fd), encoder_(key), decoder_(kGreetingLimit, key) {}

Channel::~Channel() {
    for (const int fd : descriptors_) ::close(fd);
}

void Channel::rekey(FrameKey send, FrameKey receive) {
    decoder_.rekey(std::move(receive), kFrameLimit);
    takes_descriptors_ = false;
    const std::lock_guard lock(mutex_);
    encoder_.rekey(std::move(send));
}

void Channel::hold() {
    const std::lock_guard lock(mutex_);
    held_ = true;
}

std::size_t Channel::send(Bytes payload, std::span<const int> descriptors) {
    const std::lock_guard lock(mutex_);
    if (closed_) throw Error(Code::kClosed, "the connection is closed");
    const std::size_t total = kFrameHead + payload.size();
    if (queued_ + total > kMostQueued) {
        throw Error(Code::kTransfer, std::to_string(queued_) + " bytes wait for a peer that does not read");
    }
    const auto head = encoder_.head(payload);
    std::size_t sent = 0;
    if (queue_.empty() && !held_) {
        sent = write(head, payload, descriptors);
        if (sent == total) return 0;
    }
    Piece& piece = queue_.emplace_back();
    piece.bytes.reserve(total);
    piece.bytes.insert(piece.bytes.end(), head.begin(), head.end());
    piece.bytes.insert(piece.bytes.end(), payload.begin(), payload.end());
    piece.sent = sent;
    if (sent == 0) piece.descriptors.assign(descriptors.begin(), descriptors.end());
    queued_ += total - sent;
    return queued_;
}

std::size_t Channel::flush() {
    const std::lock_guard lock(mutex_);
    held_ = false;
    while (!queue_.empty() && !closed_) {
        Piece& piece = queue_.front();
        const std::size_t sent = write({}, Bytes(piece.bytes).subspan(piece.sent), piece.descriptors);
        if (sent == 0) break;
        piece.descriptors.clear();
        piece.sent += sent;
        queued_ -= sent;
        if (piece.sent == piece.bytes.size()) queue_.pop_front();
    }
    return queued_;
}

void Channel::close() {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    queue_.clear();
    queued_ = 0;
}

// One call; 0 when the socket takes nothing now.
std::size_t Channel::write(Bytes head, Bytes payload, std::span<const int> descriptors) {
    std::array<iovec, 2> pieces{iovec{const_cast<std::byte*>(head.data()), head.size()},
                                iovec{const_cast<std::byte*>(payload.data()), payload.size()}};
    msghdr message{};
    message.msg_iov = pieces.data();
    message.msg_iovlen = pieces.size();
    alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(sizeof(int) * kMostDescriptors)> control{};
    if (!descriptors.empty()) {
        message.msg_control = control.data();
        message.msg_controllen = CMSG_SPACE(descriptors.size_bytes());
        cmsghdr* const rights = CMSG_FIRSTHDR(&message);
        rights->cmsg_level = SOL_SOCKET;
        rights->cmsg_type = SCM_RIGHTS;
        rights->cmsg_len = CMSG_LEN(descriptors.size_bytes());
        std::memcpy(CMSG_DATA(rights), descriptors.data(), descriptors.size_bytes());
    }
    for (;;) {
        const ssize_t n = ::sendmsg(fd_, &message, MSG_NOSIGNAL);
        if (n >= 0) return static_cast<std::size_t>(n);
        if (errno == EAGAIN || errno == EWOULDBLOCK) return 0;
        if (errno != EINTR) lost("send", errno);
    }
}

Channel::Read Channel::read() {
    thread_local std::vector<std::byte> buffer(kReadBytes);
    iovec piece{buffer.data(), buffer.size()};
    msghdr message{};
    message.msg_iov = &piece;
    message.msg_iovlen = 1;
    alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(sizeof(int) * kMostDescriptors)> control;
    if (takes_descriptors_) {
        message.msg_control = control.data();
        message.msg_controllen = control.size();
    }
    ssize_t n;
    do {
        n = ::recvmsg(fd_, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    } while (n < 0 && errno == EINTR);
    if (n < 0) {
        if (errno == EAGAIN || errno == EWOULDBLOCK) return Read::kNothing;
        lost("receive", errno);
    }
    for (cmsghdr* one = CMSG_FIRSTHDR(&message); one != nullptr; one = CMSG_NXTHDR(&message, one)) {
        if (one->cmsg_level != SOL_SOCKET || one->cmsg_type != SCM_RIGHTS) continue;
        const std::size_t count = (one->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        const std::size_t before = descriptors_.size();
        descriptors_.resize(before + count);
        std::memcpy(descriptors_.data() + before, CMSG_DATA(one), count * sizeof(int));
    }
    if (descriptors_.size() > kMostDescriptors || (message.msg_flags & MSG_CTRUNC) != 0) {
        throw Error(Code::kProtocol, "a greeting brought more than " + std::to_string(kMostDescriptors) + " descriptors",
                    {static_cast<std::int64_t>(descriptors_.size()), static_cast<std::int64_t>(kMostDescriptors)});
    }
    if (n == 0) return Read::kEnd;
    decoder_.feed(Bytes(buffer).first(static_cast<std::size_t>(n)));
    return Read::kSome;
}

std::vector<int> Channel::take_descriptors() { return std::exchange(descriptors_, {}); }

bool Channel::watch(std::chrono::nanoseconds look, std::chrono::nanoseconds sleep) {
    pollfd one{fd_, POLLIN | POLLRDHUP, 0};
    if (lookout_.look(look, [&] { return ::poll(&one, 1, 0) != 0; })) return true;
    if (sleep.count() <= 0) return false;
    const auto seconds = std::chrono::floor<std::chrono::seconds>(sleep);
    const timespec most{seconds.count(), (sleep - seconds).count()};
    return ::ppoll(&one, 1, &most, nullptr) != 0;
}

std::size_t Poller::wait(std::chrono::nanoseconds look, std::chrono::nanoseconds timeout, std::span<Ready> out) {
    std::array<epoll_event, kMostReady> events;
    const int most = static_cast<int>(std::min(out.size(), events.size()));
    int n = 0;
    const auto poll = [&](int milliseconds) {
        n = ::epoll_wait(epoll_, events.data(), most, milliseconds);
        if (n < 0 && errno != EINTR) lost("epoll_wait", errno);
        return n > 0;
    };
    if (!lookout_.look(look, [&] { return poll(0); })) {
        using std::chrono::milliseconds;
        const auto wait = timeout.count() < 0 ? -1 : std::min<long long>(std::chrono::ceil<milliseconds>(timeout).count(), 1 << 30);
        poll(static_cast<int>(wait));
    }
    for (int i = 0; i < n; ++i) out[static_cast<std::size_t>(i)] = {events[static_cast<std::size_t>(i)].data.fd, events[static_cast<std::size_t>(i)].events};
    return static_cast<std::size_t>(std::max(n, 0));
}

}  // namespace poolweave
