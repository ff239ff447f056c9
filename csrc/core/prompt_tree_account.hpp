// Keeps a prompt tree's count of heap bytes right while a node's vectors change; private to the tree.
#pragma once

#include "core/prompt_tree.hpp"

namespace poolweave {

class PromptTree::Account {
  public:
    Account(PromptTree& tree, const Node& node) : tree_(tree), node_(node) { tree_.heap_bytes_ -= heap_bytes(node_); }
    ~Account() { tree_.heap_bytes_ += heap_bytes(node_); }
    Account(const Account&) = delete;
    Account& operator=(const Account&) = delete;

  private:
    PromptTree& tree_;
    const Node& node_;
};

}  // namespace poolweave
