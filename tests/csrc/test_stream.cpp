// The data plane over socket pairs: whole pulls, revoked offers, hostile peers, and threads that end.
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "check.hpp"
#include "core/error.hpp"
#include "core/stream.hpp"

using namespace poolweave;
using namespace std::chrono_literals;

namespace {

std::pair<int, int> socket_pair() {
    int ends[2];
    CHECK(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
    return {ends[0], ends[1]};
}

// `blocks` blocks of `nbytes` bytes in one piece each.
struct Memory {
    Memory(std::uint32_t blocks, std::uint64_t nbytes, unsigned seed = 0) : bytes(blocks * nbytes) {
        std::mt19937 random(seed);
        if (seed != 0) {
            for (auto& one : bytes) one = static_cast<unsigned char>(random());
        }
        const Grid grid{reinterpret_cast<std::uintptr_t>(bytes.data()), bytes.size(), nbytes, nbytes, nbytes, nbytes, blocks, 1, 1};
        std::vector<std::uint8_t> tiers(blocks, 0);
        std::vector<std::int32_t> slots(blocks);
        for (std::uint32_t i = 0; i < blocks; ++i) slots[i] = static_cast<std::int32_t>(blocks - 1 - i);
        extents = std::make_shared<const Extents>(std::span(&grid, 1), tiers, slots, std::span<const Window>{});
    }
    std::vector<unsigned char> bytes;
    std::shared_ptr<const Extents> extents;
};

Patience patience(const Abort* abort = nullptr, std::chrono::nanoseconds stall = 5s) {
    return {stall, Clock::now() + 20s, abort};
}

constexpr StreamServer::Limits kLimits{2s, 20s};

void pulls_bring_equal_bytes() {
    for (std::uint64_t nbytes : {1u, 511u, 512u, 65535u, 65536u, 65537u, (1u << 20) + 3}) {
        for (const auto& [connections, blocks] : {std::pair{1u, 5u}, {2u, 5u}, {2u, 1u}, {5u, 2u}, {4u, 3u}, {2u, 9u}}) {
            Memory source(blocks, nbytes, 3), target(blocks, nbytes);
            StreamServer server(kLimits);
            server.publish(9, 77, source.extents, 60s);
            std::vector<std::unique_ptr<Wire>> owned;
            std::vector<Wire*> wires;
            for (std::size_t i = 0; i < connections; ++i) {
                const auto [ours, theirs] = socket_pair();
                server.adopt(theirs);
                wires.push_back(owned.emplace_back(std::make_unique<Wire>(ours)).get());
            }
            std::vector<std::uint64_t> hashes(blocks), wanted(blocks);
            CHECK(pull_blocks(wires, {9, 77, 0, 1u << 16}, *target.extents, patience(), hashes.data()) == Outcome::kDone);
            CHECK(source.bytes == target.bytes);
            hash_blocks(*source.extents, 0, blocks, 1, wanted.data());
            CHECK(hashes == wanted);
            Memory plain(blocks, nbytes);
            CHECK(pull_blocks(wires, {9, 77, 0, 1u << 16}, *plain.extents, patience(), nullptr) == Outcome::kDone);
            CHECK(source.bytes == plain.bytes);
            CHECK(server.num_connections() == connections);
        }
    }
}

void a_tail_of_the_blocks_can_be_asked_for() {
    Memory source(4, 100, 5), target(2, 100);
    StreamServer server(kLimits);
    server.publish(1, 2, source.extents, 60s);
    const auto [ours, theirs] = socket_pair();
    server.adopt(theirs);
    Wire wire(ours);
    Wire* const wires[] = {&wire};
    CHECK(pull_blocks(wires, {1, 2, 2, 1u << 16}, *target.extents, patience(), nullptr) == Outcome::kDone);
    CHECK(std::memcmp(target.bytes.data(), source.bytes.data(), 200) == 0);  // slots run backwards in both
}

void what_is_not_offered_is_not_sent() {
    Memory source(2, 1000, 5), target(2, 1000), three(3, 1000);
    StreamServer server(kLimits);
    const auto [ours, theirs] = socket_pair();
    server.adopt(theirs);
    Wire wire(ours);
    Wire* const wires[] = {&wire};
    const auto pull = [&](Pull what, const Memory& into) { return pull_blocks(wires, what, *into.extents, patience(), nullptr); };
    CHECK(pull({1, 2, 0, 1u << 16}, target) == Outcome::kRevoked);  // never published
    server.publish(1, 2, source.extents, 60s);
    CHECK(pull({1, 3, 0, 1u << 16}, target) == Outcome::kRevoked);  // the wrong nonce
    CHECK(pull({1, 2, 0, 1u << 16}, target) == Outcome::kDone);
    server.publish(4, 2, source.extents, 0s);
    CHECK(pull({4, 2, 0, 1u << 16}, target) == Outcome::kRevoked);  // its lifetime is over
    server.revoke(1);
    server.revoke(1);
    CHECK(pull({1, 2, 0, 1u << 16}, target) == Outcome::kRevoked);
    server.publish(5, 2, source.extents, 60s);
    CHECK_THROWS(pull({5, 2, 0, 1u << 16}, three), Code::kTransfer);  // more than is offered: refused and closed
}

void a_receiver_that_does_not_read_is_cut_by_revoke() {
    Memory source(1, 64u << 20, 0);
    StreamServer server({60s, 60s});
    server.publish(1, 2, source.extents, 60s);
    const auto [ours, theirs] = socket_pair();
    server.adopt(theirs);
    struct {
        std::uint32_t magic = 0x31515750, chunk = 32u << 20;
        std::uint64_t offer = 1, nonce = 2, offset = 0, nbytes = 64u << 20;
    } request;
    CHECK(::send(ours, &request, sizeof request, 0) == sizeof request);
    char first;
    CHECK(::recv(ours, &first, 1, 0) == 1);  // the chunk is under way, and stuck in the socket's buffer
    server.revoke(1);
    std::memset(source.bytes.data(), 1, source.bytes.size());  // nobody reads it: TSan would tell
    ::close(ours);
}

void malformed_requests_end_the_connection() {
    Memory source(1, 100, 1);
    StreamServer server(kLimits);
    server.publish(1, 2, source.extents, 60s);
    std::mt19937 random(5);
    for (int round = 0; round < 200; ++round) {
        const auto [ours, theirs] = socket_pair();
        server.adopt(theirs);
        std::vector<unsigned char> junk(40 + random() % 100);
        for (auto& one : junk) one = static_cast<unsigned char>(random());
        CHECK(::send(ours, junk.data(), junk.size(), MSG_NOSIGNAL) > 0);
        ::shutdown(ours, SHUT_WR);
        char answer[256];
        while (::recv(ours, answer, sizeof answer, 0) > 0) {
        }
        ::close(ours);
    }
    while (server.num_connections() > 0) std::this_thread::yield();
}

// What a receiver makes of frames that a sender would never send.
void hostile_chunks_are_refused() {
    struct Head {
        std::uint32_t magic, status;
        std::uint64_t offset, nbytes;
        std::array<std::uint64_t, 5> zeros{};
    };
    const Head good{0x32435750, 0, 0, 100};
    std::vector<Head> bad(8, good);
    bad[0].magic ^= 1;
    bad[1].status = 7;
    bad[2].offset = 8;
    bad[3].nbytes = 101;
    bad[4].nbytes = 0;
    bad[5].nbytes = ~std::uint64_t{0};
    bad[6].status = 2;
    bad[7].zeros[4] = 1;
    for (const Head& head : bad) {
        Memory target(1, 100);
        const auto [ours, theirs] = socket_pair();
        Wire wire(ours);
        Wire* const wires[] = {&wire};
        CHECK(::send(theirs, &head, sizeof head, 0) == sizeof head);
        CHECK_THROWS(pull_blocks(wires, {1, 2, 0, 1u << 16}, *target.extents, patience(), nullptr), Code::kTransfer);
        ::close(theirs);
    }
}

void stalls_cuts_and_aborts_end_a_pull() {
    Memory target(1, 100);
    const std::vector<Pull> asks{{1, 2, 0, 1u << 16}};
    {
        const auto [ours, theirs] = socket_pair();
        Wire wire(ours);
        Wire* const wires[] = {&wire};
        CHECK_THROWS(pull_blocks(wires, asks[0], *target.extents, patience(nullptr, 20ms), nullptr), Code::kTransfer);
        ::close(theirs);
    }
    {
        const auto [ours, theirs] = socket_pair();
        Wire wire(ours);
        Wire* const wires[] = {&wire};
        ::shutdown(theirs, SHUT_WR);
        CHECK_THROWS(pull_blocks(wires, asks[0], *target.extents, patience(), nullptr), Code::kTransfer);
        ::close(theirs);
    }
    {
        const auto [ours, theirs] = socket_pair();
        Wire wire(ours);
        Wire* const wires[] = {&wire};
        Abort abort;
        std::thread other([&abort] { abort.set(); });
        CHECK_THROWS(pull_blocks(wires, asks[0], *target.extents, patience(&abort), nullptr), Code::kClosed);
        other.join();
        ::close(theirs);
    }
}

void closing_ends_all_threads() {
    Memory source(1, 100, 1);
    StreamServer server(kLimits);
    std::vector<int> ends;
    for (int i = 0; i < 20; ++i) {
        const auto [ours, theirs] = socket_pair();
        server.adopt(theirs);
        ends.push_back(ours);
    }
    server.close();
    server.close();
    CHECK(server.num_connections() == 0);
    const auto [ours, theirs] = socket_pair();
    CHECK_THROWS(server.adopt(theirs), Code::kClosed);
    CHECK_THROWS(server.publish(1, 2, source.extents, 60s), Code::kClosed);
    ::close(ours);
    for (int end : ends) ::close(end);
}

}  // namespace

int main() {
    pulls_bring_equal_bytes();
    a_tail_of_the_blocks_can_be_asked_for();
    what_is_not_offered_is_not_sent();
    a_receiver_that_does_not_read_is_cut_by_revoke();
    malformed_requests_end_the_connection();
    hostile_chunks_are_refused();
    stalls_cuts_and_aborts_end_a_pull();
    closing_ends_all_threads();
}
