// Binding of the control stream: frames, channels and waiting for them. See csrc/core/{frame,channel}.hpp.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <optional>

#include "bindings/registry.hpp"
#include "core/channel.hpp"
#include "core/error.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace poolweave::bindings {
namespace {

constexpr double kLongest_s = 1e9;

std::chrono::nanoseconds nanoseconds(double seconds) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
        std::chrono::duration<double>(std::clamp(seconds, -1.0, kLongest_s)));
}

Bytes view(const nb::bytes& bytes) { return {static_cast<const std::byte*>(bytes.data()), bytes.size()}; }

FrameKey key_of(nb::handle key) {
    if (key.is_none()) return {};
    const Bytes bytes = view(nb::cast<nb::bytes>(key));
    if (bytes.empty()) throw Error(Code::kConfig, "a frame key is empty");
    return {bytes.begin(), bytes.end()};
}

nb::object payload_of(const std::optional<Bytes>& payload) {
    if (!payload) return nb::none();
    return nb::bytes(reinterpret_cast<const char*>(payload->data()), payload->size());
}

// Any object with bytes, for as long as this lives.
class BytesArg {
  public:
    explicit BytesArg(nb::handle object) {
        if (PyObject_GetBuffer(object.ptr(), &buffer_, PyBUF_SIMPLE) != 0) throw nb::python_error();
    }
    BytesArg(const BytesArg&) = delete;
    BytesArg& operator=(const BytesArg&) = delete;
    ~BytesArg() { PyBuffer_Release(&buffer_); }
    Bytes bytes() const { return {static_cast<const std::byte*>(buffer_.buf), static_cast<std::size_t>(buffer_.len)}; }

  private:
    Py_buffer buffer_;
};

void register_frames(nb::module_& m) {
    m.attr("GREETING_LIMIT") = nb::int_(kGreetingLimit);
    m.attr("FRAME_LIMIT") = nb::int_(kFrameLimit);
    nb::class_<FrameEncoder>(m, "FrameEncoder", "Turns payloads into frames; one for each direction of a connection.")
        .def("__init__", [](FrameEncoder* self, nb::handle key) { new (self) FrameEncoder(key_of(key)); },
             "key"_a.none() = nb::none(), nb::sig("def __init__(self, key: bytes | None = None) -> None"))
        .def("encode", [](FrameEncoder& self, const nb::bytes& payload) {
            const auto head = self.head(view(payload));
            std::vector<std::byte> frame(head.begin(), head.end());
            frame.insert(frame.end(), view(payload).begin(), view(payload).end());
            return nb::bytes(reinterpret_cast<const char*>(frame.data()), frame.size());
        }, "payload"_a, "Raises ProtocolError for a payload over FRAME_LIMIT.");
    nb::class_<FrameDecoder>(m, "FrameDecoder", "Turns received bytes into payloads, whatever the pieces they come in.")
        .def("__init__", [](FrameDecoder* self, std::size_t limit, nb::handle key) { new (self) FrameDecoder(limit, key_of(key)); },
             "limit"_a = kFrameLimit, "key"_a.none() = nb::none(),
             nb::sig("def __init__(self, limit: int = 33554432, key: bytes | None = None) -> None"))
        .def("feed", [](FrameDecoder& self, nb::handle data) { self.feed(BytesArg(data).bytes()); }, "data"_a,
             nb::sig("def feed(self, data: bytes | bytearray | memoryview) -> None"))
        .def("next", [](FrameDecoder& self) { return payload_of(self.next()); },
             nb::sig("def next(self) -> bytes | None"),
             "The next whole payload, or None when more bytes are needed. Raises ProtocolError; then close the stream.")
        .def_prop_ro("buffered", &FrameDecoder::buffered);
}

nb::object read_next(Channel& self) {
    switch (self.read()) {
        case Channel::Read::kEnd: throw Error(Code::kClosed, "the peer closed the connection");
        case Channel::Read::kNothing: return nb::none();
        case Channel::Read::kSome: break;
    }
    return payload_of(self.next());
}

}  // namespace

void register_channel(nb::module_& m) {
    register_frames(m);
    nb::class_<Channel>(m, "Channel", "Frames in and out of a non-blocking stream socket, which it borrows.")
        .def("__init__", [](Channel* self, int fd, nb::handle key) { new (self) Channel(fd, key_of(key)); }, "fd"_a,
             "key"_a.none(), nb::sig("def __init__(self, fd: int, key: bytes | None) -> None"))
        .def("rekey", [](Channel& self, nb::handle send, nb::handle receive) { self.rekey(key_of(send), key_of(receive)); },
             "send"_a.none(), "receive"_a.none(),
             nb::sig("def rekey(self, send: bytes | None, receive: bytes | None) -> None"))
        .def("hold", &Channel::hold)
        .def("send", [](Channel& self, const nb::bytes& payload, const std::vector<int>& descriptors) {
            return self.send(view(payload), descriptors);
        }, "payload"_a, "descriptors"_a = std::vector<int>{}, "Returns how many bytes wait for flush().")
        .def("flush", &Channel::flush)
        .def("close", &Channel::close)
        .def("read_next", &read_next, nb::sig("def read_next(self) -> bytes | None"),
             "Take in what has come, then as next(). Raises InstanceClosed at the end of the stream.")
        .def("next", [](Channel& self) { return payload_of(self.next()); }, nb::sig("def next(self) -> bytes | None"),
             "The next whole payload of what was taken in, or None. Raises ProtocolError; then close the connection.")
        .def_prop_ro("buffered", &Channel::buffered)
        .def("take_descriptors", &Channel::take_descriptors)
        .def("watch", [](Channel& self, double look_s, double sleep_s) {
            const nb::gil_scoped_release nogil;
            return self.watch(nanoseconds(look_s), nanoseconds(sleep_s));
        }, "look_s"_a, "sleep_s"_a,
           "True when there may be something to read: looks for `look_s` where that pays, then sleeps up to `sleep_s`.");
    nb::class_<Poller>(m, "Poller", "Waits on an epoll descriptor, which it borrows. For one thread.")
        .def(nb::init<int>(), "epoll"_a)
        .def("wait", [](Poller& self, double look_s, double timeout_s) {
            std::array<Ready, 64> ready;
            std::size_t n;
            {
                const nb::gil_scoped_release nogil;
                n = self.wait(nanoseconds(look_s), nanoseconds(timeout_s), ready);
            }
            nb::list out;
            for (std::size_t i = 0; i < n; ++i) out.append(nb::make_tuple(ready[i].fd, ready[i].events));
            return out;
        }, "look_s"_a, "timeout_s"_a, nb::sig("def wait(self, look_s: float, timeout_s: float) -> list[tuple[int, int]]"),
           "(descriptor, events) of what is ready: looks for `look_s` where that pays, then sleeps up to `timeout_s`.");
}

}  // namespace poolweave::bindings
