// The extension module poolweave._core and its one table from native error codes to Python exceptions.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include "bindings/registry.hpp"
#include "core/error.hpp"

namespace nb = nanobind;
using poolweave::Code;
using poolweave::Error;

namespace {

const char* python_name(Code code) {
    switch (code) {
        case Code::kConfig: return "ConfigError";
        case Code::kOutOfBlocks: return "OutOfBlocks";
        case Code::kOutOfPages: return "OutOfPages";
        case Code::kUnknownBlock: return "UnknownBlock";
        case Code::kStaleHandle: return "StaleHandle";
        case Code::kNotResident: return "NotResident";
        case Code::kNotSealed: return "NotSealed";
        case Code::kPrivate: return "PrivateBlock";
        case Code::kTransfer: return "TransferFailed";
        case Code::kProtocol: return "ProtocolError";
        case Code::kOs: return "SystemCallFailed";
        case Code::kClosed: return "InstanceClosed";
        case Code::kMalformed: return "EventsMalformed";
    }
    return "PoolweaveError";
}

void translate(const std::exception_ptr& pointer, void*) {
    try {
        std::rethrow_exception(pointer);
    } catch (const Error& error) {
        nb::object type = nb::module_::import_("poolweave.errors").attr(python_name(error.code()));
        nb::object raised = type.attr("from_native")(error.what(), error.numbers());
        PyErr_SetObject(type.ptr(), raised.ptr());
    }
}

}  // namespace

NB_MODULE(_core, m) {
    m.doc() = "Native core of poolweave: arenas, blocks, the radix tree, copies and streams.";
#ifdef NDEBUG
    nb::set_leak_warnings(false);  // a pool that was never closed says so itself, and shorter
#endif
    nb::register_exception_translator(translate, nullptr);
    poolweave::bindings::register_arena(m);
    poolweave::bindings::register_blocks(m);
    poolweave::bindings::register_radix(m);
    poolweave::bindings::register_catalogue(m);
    poolweave::bindings::register_events(m);
    poolweave::bindings::register_copy(m);
    poolweave::bindings::register_device(m);
    poolweave::bindings::register_stream(m);
    poolweave::bindings::register_channel(m);
    poolweave::bindings::register_prompt_tree(m);
    poolweave::bindings::register_candidates(m);
    poolweave::bindings::register_simulation(m);
    poolweave::bindings::register_decode(m);
    poolweave::bindings::register_workers(m);
}
