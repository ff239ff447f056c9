// The control stream: frames survive any cut, no altered or invented bytes give a payload, channels pass descriptors.
#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "check.hpp"
#include "core/channel.hpp"
#include "core/checksum.hpp"
#include "core/error.hpp"

using namespace poolweave;
using namespace std::chrono_literals;

namespace {

using Buffer = std::vector<std::byte>;

const FrameKey kKey(32, std::byte{7});

Buffer random_bytes(std::mt19937& random, std::size_t most) {
    Buffer out(random() % (most + 1));
    for (auto& one : out) one = static_cast<std::byte>(random());
    return out;
}

Buffer frames_of(const std::vector<Buffer>& payloads, const FrameKey& key) {
    FrameEncoder encoder(key);
    Buffer out;
    for (const Buffer& payload : payloads) {
        const auto head = encoder.head(payload);
        out.insert(out.end(), head.begin(), head.end());
        out.insert(out.end(), payload.begin(), payload.end());
    }
    return out;
}

// What a decoder makes of `stream` in pieces; it ends where the decoder refuses.
std::vector<Buffer> decode(Bytes stream, const FrameKey& key, std::mt19937& random, std::size_t limit = kFrameLimit) {
    FrameDecoder decoder(limit, key);
    std::vector<Buffer> out;
    try {
        while (!stream.empty()) {
            const std::size_t n = std::min<std::size_t>(stream.size(), 1 + random() % 97);
            decoder.feed(stream.first(n));
            stream = stream.subspan(n);
            while (const auto payload = decoder.next()) out.emplace_back(payload->begin(), payload->end());
        }
    } catch (const Error& error) {
        CHECK(error.code() == Code::kProtocol);
    }
    return out;
}

void frames_survive_any_cut() {
    std::mt19937 random(1);
    for (int round = 0; round < 300; ++round) {
        const FrameKey key = round % 2 == 0 ? FrameKey{} : kKey;
        std::vector<Buffer> payloads;
        for (unsigned i = random() % 5; i > 0; --i) payloads.push_back(random_bytes(random, 700));
        CHECK(decode(frames_of(payloads, key), key, random) == payloads);
    }
}

void altered_bytes_give_no_payload() {
    std::mt19937 random(2);
    for (int round = 0; round < 3000; ++round) {
        const FrameKey key = round % 2 == 0 ? FrameKey{} : kKey;
        std::vector<Buffer> payloads;
        for (unsigned i = 1 + random() % 3; i > 0; --i) payloads.push_back(random_bytes(random, 60));
        Buffer stream = frames_of(payloads, key);
        switch (random() % 4) {
            case 0: stream[random() % stream.size()] ^= static_cast<std::byte>(1u << random() % 8); break;
            case 1: stream.erase(stream.begin() + static_cast<std::ptrdiff_t>(random() % stream.size())); break;
            case 2: stream.insert(stream.begin() + static_cast<std::ptrdiff_t>(random() % stream.size()), std::byte(random())); break;
            default: stream.resize(random() % stream.size());
        }
        const auto got = decode(stream, key, random, 1000);
        CHECK(got.size() <= payloads.size());
        for (std::size_t i = 0; i < got.size(); ++i) CHECK(got[i] == payloads[i]);
    }
}

void junk_gives_no_payload() {
    std::mt19937 random(3);
    for (int round = 0; round < 3000; ++round) {
        Buffer junk = random_bytes(random, 200);
        if (round % 2 == 0 && junk.size() >= 12) {  // the right magic and version, so that the rest is looked at
            const unsigned char head[]{0x50, 0x57, kFrameVersion};
            std::memcpy(junk.data(), head, sizeof head);
            const std::uint64_t check = checksum(junk.data(), 8);
            if (round % 4 == 0) std::memcpy(junk.data() + 8, &check, 4);
        }
        CHECK(decode(junk, round % 3 == 0 ? kKey : FrameKey{}, random, 1000).empty());
    }
}

void a_damaged_header_is_refused_before_its_payload_comes() {
    const auto head = FrameEncoder().head(Buffer(60));
    for (unsigned bit = 0; bit < 96; ++bit) {
        Buffer damaged(head.begin(), head.begin() + 12);
        damaged[bit / 8] ^= static_cast<std::byte>(1u << bit % 8);
        FrameDecoder decoder;
        decoder.feed(damaged);
        CHECK_THROWS(decoder.next(), Code::kProtocol);
    }
}

void a_length_is_refused_before_its_bytes_come() {
    FrameEncoder encoder;
    const auto head = encoder.head(Buffer(101));
    FrameDecoder decoder(100);
    decoder.feed(Bytes(head).first(12));
    CHECK_THROWS(decoder.next(), Code::kProtocol);
    CHECK_THROWS(encoder.head(Buffer(kFrameLimit + 1)), Code::kProtocol);
}

struct Ends {
    Ends() {
        int both[2];
        CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, both) == 0);
        a = both[0], b = both[1];
    }
    ~Ends() { ::close(a), ::close(b); }
    int a, b;
};

void channels_pass_frames_and_descriptors() {
    Ends ends;
    Channel here(ends.a, kKey), there(ends.b, kKey);
    CHECK(!there.watch(1us, 0us) && !there.watch(0us, 1us) && there.read() == Channel::Read::kNothing);
    const int null = ::open("/dev/null", O_RDONLY);
    const std::vector<int> given{null, null};
    CHECK(here.send(Buffer(5, std::byte{1}), given) == 0);
    CHECK(there.watch(0s, 5s) && there.read() == Channel::Read::kSome);
    CHECK(there.next()->size() == 5 && !there.next() && there.buffered() == 0);
    const auto taken = there.take_descriptors();
    CHECK(taken.size() == 2 && there.take_descriptors().empty());
    for (const int fd : taken) CHECK(::close(fd) == 0);
    ::close(null);
    here.rekey(FrameKey(8, std::byte{1}), FrameKey(8, std::byte{2}));
    there.rekey(FrameKey(8, std::byte{2}), FrameKey(8, std::byte{1}));
    CHECK(there.send(Buffer(9), {}) == 0 && here.read() == Channel::Read::kSome && here.next()->size() == 9);
    here.close();
    CHECK_THROWS(here.send(Buffer(1), {}), Code::kClosed);
}

void what_the_socket_does_not_take_waits() {
    Ends ends;
    Channel here(ends.a, {}), there(ends.b, {});
    here.hold();
    CHECK(here.send(Buffer(3), {}) == 3 + kFrameHead && here.flush() == 0);
    CHECK(there.read() == Channel::Read::kSome && there.next()->size() == 3);
    here.rekey({}, {});
    there.rekey({}, {});
    std::size_t waiting = 0, sent = 0;
    for (; waiting == 0; ++sent) waiting = here.send(Buffer(100'000), {});
    std::size_t got = 0;
    while (got < sent) {
        waiting = here.flush();
        if (there.read() == Channel::Read::kSome) {
            while (there.next()) ++got;
        }
    }
    CHECK(waiting == 0);
    CHECK_THROWS([&] { for (;;) here.send(Buffer(kFrameLimit / 2), {}); }(), Code::kTransfer);
}

void the_end_and_the_loss_are_told() {
    Ends ends;
    Channel here(ends.a, {});
    ::shutdown(ends.b, SHUT_RDWR);
    CHECK(here.read() == Channel::Read::kEnd);
    CHECK_THROWS(here.send(Buffer(1), {}), Code::kOs);
}

void looking_in_vain_is_done_less_and_less() {
    Lookout lookout;
    int looks = 0;
    const auto never = [&] { return ++looks, false; };
    CHECK(!lookout.look(1us, never) && lookout.passing() == 0);  // once is no habit
    unsigned before = 0;
    for (int vain = 0; vain < 4; ++vain) {
        CHECK(!lookout.look(1us, never));
        CHECK(lookout.passing() > before);
        before = lookout.passing();
        looks = 0;
        for (unsigned i = 0; i < before; ++i) CHECK(!lookout.look(1h, never));
        CHECK(looks == static_cast<int>(before) && lookout.passing() == 0);  // each a look and no more
    }
    CHECK(lookout.look(1h, [&] { return looks-- < 0; }));
    CHECK(lookout.passing() == 0);
    CHECK(!lookout.look(1us, never) && lookout.passing() == 0);  // a hit, and all is forgotten
}

void a_core_that_is_taken_ends_the_looking() {
    Lookout lookout;
    int looks = 0;
    const auto slow = [&] {
        if (++looks == 2) std::this_thread::sleep_for(5ms);
        return false;
    };
    CHECK(!lookout.look(1h, slow) && looks == 2);
}

void a_poller_tells_what_is_ready() {
    Ends ends;
    const int epoll = ::epoll_create1(EPOLL_CLOEXEC);
    epoll_event event{EPOLLIN, {.fd = ends.a}};
    CHECK(::epoll_ctl(epoll, EPOLL_CTL_ADD, ends.a, &event) == 0);
    Poller poller(epoll);
    std::array<Ready, 4> ready;
    CHECK(poller.wait(1us, 0us, ready) == 0);
    CHECK(::write(ends.b, "x", 1) == 1);
    CHECK(poller.wait(0us, -1s, ready) == 1 && ready[0].fd == ends.a && (ready[0].events & EPOLLIN) != 0);
    ::close(epoll);
}

}  // namespace

int main() {
    frames_survive_any_cut();
    altered_bytes_give_no_payload();
    junk_gives_no_payload();
    a_damaged_header_is_refused_before_its_payload_comes();
    a_length_is_refused_before_its_bytes_come();
    channels_pass_frames_and_descriptors();
    what_the_socket_does_not_take_waits();
    the_end_and_the_loss_are_told();
    looking_in_vain_is_done_less_and_less();
    a_core_that_is_taken_ends_the_looking();
    a_poller_tells_what_is_ready();
    return 0;
}
