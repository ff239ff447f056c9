// Arrays by name: matrices are packed into memory of this object, vectors borrowed and kept alive with it.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <memory>
#include <string>
#include <vector>

#include "core/decode/linear.hpp"
#include "core/decode/packed.hpp"
#include "core/error.hpp"

namespace poolweave::bindings {

using AnyArray = nanobind::ndarray<nanobind::ro, nanobind::c_contig, nanobind::device::cpu>;

using Named = nanobind::typed<nanobind::dict, nanobind::str, nanobind::object>;

// A packed matrix that went out to Python, with the store it lies in.
struct PackedWeight {
    std::shared_ptr<decode::PackedStore> store;
    decode::Packed packed;
};

class Weights {
  public:
    decode::PackedStore& store() { return store_; }

    // float32, or uint16 holding bfloat16; leading axes are folded into rows. Empty for a name that is missing or None.
    // Borrowed from the dictionary.
    static decode::Matrix matrix(const Named& from, const char* name) {
        return given(from, name) ? matrix(nanobind::cast<AnyArray>(from[name]), name) : decode::Matrix{};
    }

    static decode::Matrix matrix(const AnyArray& array, const char* name) {
        const bool wide = array.dtype() == nanobind::dtype<float>();
        if (array.ndim() < 2 || (!wide && array.dtype() != nanobind::dtype<std::uint16_t>()))
            throw Error(Code::kConfig, std::string(name) + " must be a float32 or bfloat16 (as uint16) matrix");
        const auto cols = static_cast<std::int64_t>(array.shape(array.ndim() - 1));
        const auto rows = cols == 0 ? 0 : static_cast<std::int64_t>(array.size()) / cols;
        return {array.data(), rows, cols, cols, wide ? decode::Dtype::kF32 : decode::Dtype::kBf16};
    }

    // A matrix as `matrix` takes it, packed here, or a PackedWeight, kept alive.
    decode::Packed packed(const Named& from, const char* name) {
        if (given(from, name) && nanobind::isinstance<PackedWeight>(from[name])) return keep(from[name]);
        return store_.pack(matrix(from, name));
    }

    // A list of PackedWeights, kept alive.
    std::vector<decode::Packed> packed_list(const Named& from, const char* name) {
        std::vector<decode::Packed> list;
        for (const nanobind::handle each : nanobind::cast<nanobind::list>(from[name])) list.push_back(keep(each));
        return list;
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
        const decode::Packed weight = packed(from, name);
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

    decode::Packed keep(nanobind::handle weight) {
        const auto& held = nanobind::cast<const PackedWeight&>(weight);
        if (stores_.empty() || stores_.back() != held.store) stores_.push_back(held.store);
        return held.packed;
    }

    std::vector<AnyArray> kept_;
    std::vector<std::shared_ptr<decode::PackedStore>> stores_;
    decode::PackedStore store_;
};

// A number by name. Throws kConfig for a missing one.
template <class T>
T number(const Named& from, const char* name) {
    if (!from.contains(name)) throw Error(Code::kConfig, std::string(name) + " is missing");
    return nanobind::cast<T>(from[name]);
}

}  // namespace poolweave::bindings
