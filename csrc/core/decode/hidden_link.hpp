// Hidden states over TCP: what the mailbox of a slot is within a host, a link is between two.
//
// On the KV side a link stands for one FFN rank: slots whose turn is that rank's are sent, and come back with the FFN's
// answer. On the weights side it is the attention side: slots arrive, the rank's ordinary worker runs them on a board of
// its own, and the answer goes back. Sending and receiving are threads of their own: with enough batches in flight both
// ways are stages of the pipeline beside attention and FFN. Source: CrossPool's limit that transfers stay on the critical path.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "core/decode/board.hpp"

namespace poolweave::decode {

enum class LinkEnd : std::uint8_t { kAttention, kFfn };  // the side this end stands on

// One connection, one FFN rank. Owns the socket. `send` and `receive` run on a thread each until the connection ends, the
// board is aborted, or a frame comes that cannot be.
class HiddenLink {
  public:
    // `fd`: a connected stream socket; it is closed with the link, also when this throws kConfig for a rank that is none.
    HiddenLink(const Board& board, int fd, int rank, LinkEnd end);
    HiddenLink(const HiddenLink&) = delete;
    HiddenLink& operator=(const HiddenLink&) = delete;
    ~HiddenLink();

    // Send every slot that is this link's to send.
    void send();
    // Take in every slot that comes. Throws kConfig for a frame that does not fit the board.
    void receive();

    // Control lowering off, on the KV side: one slot there and back. Throws kOs when the connection ends meanwhile.
    void step(std::int64_t slot);

    // End both threads. Any thread; more than once is fine.
    void shut() noexcept;

  private:
    struct Frame {
        std::uint32_t magic, slot, model, layer, rows, hidden, attention, onto;
    };

    Turn outgoing() const noexcept;
    Bell& bell() const noexcept;
    bool ship_next();
    bool ship(std::int64_t index);
    void check(const Frame& frame) const;
    bool is_question(const Frame& frame) const noexcept;
    bool is_answer(const Frame& frame) const noexcept;
    void arrive_at_ffn(const Frame& frame);
    void arrive_at_attention(const Frame& frame);
    bool write(const void* data, std::size_t nbytes);
    bool read(void* data, std::size_t nbytes);

    const Board& board_;
    int fd_, rank_;
    LinkEnd end_;
    std::mutex sending_;
    std::atomic<bool> shut_{false};
    std::vector<std::atomic<bool>> hosted_;  // slots that a step waits for
    Bell back_{};  // rung when a hosted step's slot came back
};

}  // namespace poolweave::decode
