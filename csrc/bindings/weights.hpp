// Arrays by name, as borrowed matrices; what they borrow from stays alive with this object.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <string>
#include <vector>

#include "core/decode/matrix.hpp"
#include "core/error.hpp"

namespace poolweave::bindings {

using AnyArray = nanobind::ndarray<nanobind::ro, nanobind::c_contig, nanobind::device::cpu>;

using Named = nanobind::typed<nanobind::dict, nanobind::str, nanobind::object>;

class Weights {
  public:
    // float32, or uint16 holding bfloat16; leading axes are folded into rows. Empty for a name that is missing or None.
    decode::Matrix matrix(const Named& from, const char* name) {
        if (!given(from, name)) return {};
        const AnyArray array = nanobind::cast<AnyArray>(from[name]);
        const bool wide = array.dtype() == nanobind::dtype<float>();
        if (array.ndim() < 2 || (!wide && array.dtype() != nanobind::dtype<std::uint16_t>()))
            throw Error(Code::kConfig, std::string(name) + " must be a float32 or bfloat16 (as uint16) matrix");
        const auto cols = static_cast<std::int64_t>(array.shape(array.ndim() - 1));
        const auto rows = cols == 0 ? 0 : static_cast<std::int64_t>(array.size()) / cols;
        kept_.push_back(array);
        return {array.data(), rows, cols, cols, wide ? decode::Dtype::kF32 : decode::Dtype::kBf16};
    }

    // float32 [size], or null for a name that is missing or None.
    const float* vector(const Named& from, const char* name, std::int64_t size) {
        if (!given(from, name)) return nullptr;
        const AnyArray array = nanobind::cast<AnyArray>(from[name]);
        if (array.dtype() != nanobind::dtype<float>() || static_cast<std::int64_t>(array.size()) != size)
            throw Error(Code::kConfig, std::string(name) + " must be " + std::to_string(size) + " float32 numbers");
        kept_.push_back(array);
        return static_cast<const float*>(array.data());
    }

    // `name` with the bias `name` + "_bias", if there is one.
    decode::Linear linear(const Named& from, const char* name) {
        const decode::Matrix weight = matrix(from, name);
        return {weight, vector(from, (std::string(name) + "_bias").c_str(), weight.rows)};
    }

    decode::RmsNorm norm(const Named& from, const char* name, std::int64_t size) {
        const std::string eps = std::string(name) + "_eps";
        return {vector(from, name, size), given(from, eps.c_str()) ? nanobind::cast<float>(from[eps.c_str()]) : 1e-6F};
    }

  private:
    static bool given(const Named& from, const char* name) {
        return from.contains(name) && !from[name].is_none();
    }

    std::vector<AnyArray> kept_;
};

// A number by name. Throws kConfig for a missing one.
template <class T>
T number(const Named& from, const char* name) {
    if (!from.contains(name)) throw Error(Code::kConfig, std::string(name) + " is missing");
    return nanobind::cast<T>(from[name]);
}

}  // namespace poolweave::bindings
