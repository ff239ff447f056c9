#include "core/decode/linear.hpp"

#include "core/error.hpp"

namespace poolweave::decode {

namespace {

std::string shape(std::int64_t rows, std::int64_t cols) {
    std::string text = std::to_string(rows);
    text += " x ";
    text += std::to_string(cols);
    return text;
}

}  // namespace

void check_linear(const std::string& name, const Packed& weight, std::int64_t rows, std::int64_t cols) {
    if (weight && weight.rows == rows && weight.cols == cols && rows > 0 && cols > 0) return;
    throw Error(Code::kConfig, "weight of " + name + " must be " + shape(rows, cols) + ", is " +
                                   (weight ? shape(weight.rows, weight.cols) : std::string("missing")));
}

}  // namespace poolweave::decode
