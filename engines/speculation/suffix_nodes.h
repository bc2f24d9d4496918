// The nodes of a suffix tree. The children of a node are a list, which the most frequent one heads. Children with
// siblings are also in a hash table.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace {

using Index = int32_t;
constexpr Index NONE = -1, ROOT = 0;

struct Node {
    Index parent = NONE, first = NONE;             // `first`: the most frequent child; of equals, the smallest token
    Index next = NONE, previous = NONE;            // in the list of the parent's children
    Index token = NONE;                            // the first one of the edge
    Index sequence = NONE, start = 0, length = 0;  // the edge: a span of a stored sequence
    Index count = 0, ends = 0;                     // occurrences of the path; suffixes that end here
};

template <class T>
void grow(std::vector<T>& values, size_t extra) {
    if (values.capacity() < values.size() + extra) values.reserve(values.size() + extra + values.size() / 2);
}

class Nodes {
 public:
    Node& operator[](Index n) { return nodes_[size_t(n)]; }
    const Node& operator[](Index n) const { return nodes_[size_t(n)]; }
    size_t size() const { return nodes_.size(); }  // with unused ones
    size_t num_used() const { return nodes_.size() - num_unused_; }
    size_t num_entries() const { return num_entries_; }

    // Makes room for more nodes, so that `make` and `link` throw nothing.
    void reserve(size_t extra) {
        grow(nodes_, extra);
        const size_t needed = 2 * (num_entries_ + 2 * extra);
        if (needed <= table_.size()) return;
        size_t size = 64;
        while (size < needed) size *= 2;
        std::vector<Index> before(size, NONE);
        before.swap(table_), num_entries_ = 0;
        for (const Index n : before)
            if (n != NONE) enter(n);
    }
    Index make(const Node& node) {
        if (unused_ == NONE) return nodes_.push_back(node), Index(nodes_.size() - 1);
        const Index n = unused_;
        unused_ = nodes_[n].next, num_unused_--;
        nodes_[n] = node;
        return n;
    }
    void release(Index n) {
        nodes_[n] = Node{};
        nodes_[n].next = unused_;
        unused_ = n, num_unused_++;
    }

    bool has_siblings(Index n) const { return nodes_[n].next != NONE || nodes_[n].previous != NONE; }
    bool has_one_child(Index n) const { return nodes_[n].first != NONE && nodes_[nodes_[n].first].next == NONE; }
    bool leads(Index n, Index other) const {
        const Node &a = nodes_[n], &b = nodes_[other];
        return a.count != b.count ? a.count > b.count : a.token < b.token;
    }
    Index child(Index n, Index token) const {
        const Index first = nodes_[n].first;
        if (first == NONE || nodes_[first].token == token) return first;
        return nodes_[first].next == NONE ? NONE : table_[slot_of(n, token)];
    }
    void link(Index n) {  // to its parent
        const Index first = nodes_[nodes_[n].parent].first;
        if (first != NONE) {
            if (nodes_[first].next == NONE) enter(first);
            enter(n);
        }
        insert(n, first == NONE || leads(n, first) ? NONE : first);
    }
    void unlink(Index n) {
        const Index parent = nodes_[n].parent;
        const bool had_siblings = has_siblings(n);
        if (had_siblings) leave(n);
        cut(n);
        if (had_siblings && has_one_child(parent)) leave(nodes_[parent].first);
    }
    void promote(Index n) {  // to the head of the list, if it leads the present one
        const Index first = nodes_[nodes_[n].parent].first;
        if (first == n || !leads(n, first)) return;
        cut(n);
        insert(n, NONE);
    }
    void replace(Index old, Index n) {  // puts a node, whose first token is the same, in the place of another
        Node &node = nodes_[n], &before = nodes_[old];
        if (has_siblings(old)) table_[slot_of(before.parent, before.token)] = n;
        node.parent = before.parent, node.token = before.token;
        node.next = before.next, node.previous = before.previous;
        (node.previous == NONE ? nodes_[node.parent].first : nodes_[node.previous].next) = n;
        if (node.next != NONE) nodes_[node.next].previous = n;
    }

 private:
    std::vector<Node> nodes_ = std::vector<Node>(1);
    Index unused_ = NONE;  // list of unused nodes, linked by `next`
    size_t num_unused_ = 0, num_entries_ = 0;
    std::vector<Index> table_ = std::vector<Index>(64, NONE);

    size_t home(Index parent, Index token) const {
        const uint64_t key = uint64_t(uint32_t(parent)) << 32 | uint32_t(token);
        return (key * 0x9E3779B97F4A7C15u >> 32) & (table_.size() - 1);
    }
    size_t slot_of(Index parent, Index token) const {  // of the child, or an empty one
        size_t slot = home(parent, token);
        for (; table_[slot] != NONE; slot = (slot + 1) & (table_.size() - 1)) {
            const Node& node = nodes_[table_[slot]];
            if (node.token == token && node.parent == parent) break;
        }
        return slot;
    }
    void enter(Index n) {
        table_[slot_of(nodes_[n].parent, nodes_[n].token)] = n;
        num_entries_++;
    }
    void leave(Index n) {  // and moves later entries up, so that a search still finds them
        const size_t mask = table_.size() - 1;
        size_t hole = slot_of(nodes_[n].parent, nodes_[n].token);
        for (size_t slot = (hole + 1) & mask; table_[slot] != NONE; slot = (slot + 1) & mask) {
            const Node& node = nodes_[table_[slot]];
            if (((slot - home(node.parent, node.token)) & mask) < ((slot - hole) & mask)) continue;
            table_[hole] = table_[slot], hole = slot;
        }
        table_[hole] = NONE;
        num_entries_--;
    }
    void cut(Index n) {  // out of the list of its siblings
        const Node& node = nodes_[n];
        (node.previous == NONE ? nodes_[node.parent].first : nodes_[node.previous].next) = node.next;
        if (node.next != NONE) nodes_[node.next].previous = node.previous;
    }
    void insert(Index n, Index previous) {
        Node& node = nodes_[n];
        Index& link = previous == NONE ? nodes_[node.parent].first : nodes_[previous].next;
        node.previous = previous, node.next = link, link = n;
        if (node.next != NONE) nodes_[node.next].previous = n;
    }
};

}  // namespace
