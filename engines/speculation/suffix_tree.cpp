// The suffix tree of `suffix_tree.py`, whose docstring says what it holds and what a draft is. `plain_suffix_tree.py` is
// the same in Python. An edge is a span of a stored sequence. A node stands where paths part or where a suffix ends, and
// nowhere else: all paths along an edge have the same count, and the tree's shape depends on its content alone.

#include <algorithm>
#include <cstdint>
#include <new>
#include <unordered_map>
#include <vector>

namespace {

using Index = int32_t;
constexpr Index NONE = -1, ROOT = 0;

struct Node {
    Index parent = NONE, first = NONE;       // its most frequent child heads the list of its children
    Index next = NONE, previous = NONE;      // in the list of the parent's children
    Index token = NONE;                      // the first one of the edge
    Index sequence = NONE, start = 0, length = 0;  // the edge
    Index count = 0, ends = 0;               // occurrences of the path; suffixes that end here
};

struct Sequence {
    int64_t id = NONE, born = 0;
    bool finished = false;
    std::vector<Index> tokens, ends;  // ends: the node at which the suffix from each token ends
};

struct Arguments {  // as SpeculationArgs.packed
    int32_t max_tokens, pattern_max, pattern_min, top_k, min_count;
    double min_probability;
};

struct Place {  // a path of `depth` tokens, which covers `offset` tokens of the edge of `node`
    Index node, offset, depth;
};

struct Path {  // of a beam search
    double score;
    Index rank, token, step;  // `step` points into `steps_`
    bool done;
    Place at;
    bool operator<(const Path& other) const {
        if (score != other.score) return score > other.score;
        return rank != other.rank ? rank < other.rank : token < other.token;
    }
};

struct Step {
    Index token, before;
};

constexpr int64_t NODE_BYTES = sizeof(Node) + 2 * sizeof(Index), TOKEN_BYTES = 2 * sizeof(Index), SEQUENCE_BYTES = 128;

template <class T>
void grow(std::vector<T>& values, size_t extra) {
    if (values.capacity() < values.size() + extra) values.reserve(values.size() + extra + values.size() / 2);
}

class Tree {
 public:
    Tree(Index depth, int64_t max_bytes) : depth_(depth), max_bytes_(max_bytes) { clear(); }

    int64_t num_tokens() const { return nodes_[ROOT].count; }
    int64_t num_nodes() const { return int64_t(nodes_.size() - num_free_); }
    int64_t num_evictions() const { return num_evictions_; }
    int64_t num_bytes() const {
        return num_nodes() * NODE_BYTES + num_tokens() * TOKEN_BYTES + int64_t(slots_.size()) * SEQUENCE_BYTES;
    }
    int64_t length(int64_t id) const {
        const Index s = find(id);
        return s == NONE ? 0 : int64_t(sequences_[s].tokens.size());
    }
    void finish(int64_t id) {
        if (const Index s = find(id); s != NONE) sequences_[s].finished = true;
    }
    template <class T>
    void append(int64_t id, const T* tokens, int64_t size) {
        for (int64_t i = 0; i < size; i++) {
            while (num_bytes() + depth_ * NODE_BYTES + TOKEN_BYTES + SEQUENCE_BYTES > max_bytes_ && evict(id)) {}
            push(open(id), Index(tokens[i]));
        }
    }
    void remove(int64_t id) {
        if (const Index s = find(id); s != NONE) erase(s);
    }
    Index speculate(int64_t id, const Index* pattern, Index size, const Arguments& arguments);
    const std::vector<Path>& paths() const { return paths_; }
    const std::vector<Step>& steps() const { return steps_; }
    int check() const;

 private:
    const Index depth_;
    const int64_t max_bytes_;
    int64_t num_evictions_ = 0, num_born_ = 0;
    std::vector<Node> nodes_;
    Index free_ = NONE;  // list of unused nodes, linked by `next`
    size_t num_free_ = 0;
    std::vector<Index> table_;  // children of nodes with more than one, hashed by parent and token
    size_t num_entries_ = 0;
    std::vector<Sequence> sequences_;
    std::vector<Index> unused_;  // places in `sequences_`
    std::unordered_map<int64_t, Index> slots_;
    std::vector<Path> paths_, candidates_;  // of a call of `speculate`; kept, to allocate nothing in most calls
    std::vector<Step> steps_;

    // -- memory

    void clear() {
        nodes_ = std::vector<Node>(1);
        table_ = std::vector<Index>(64, NONE);
        sequences_ = {}, unused_ = {}, slots_ = {};
        free_ = NONE, num_free_ = 0, num_entries_ = 0;
    }
    Index find(int64_t id) const {
        const auto found = slots_.find(id);
        return found == slots_.end() ? NONE : found->second;
    }
    Index open(int64_t id) {
        if (const Index s = find(id); s != NONE) return s;
        if (unused_.empty()) {
            unused_.push_back(Index(sequences_.size()));
            sequences_.emplace_back();
        }
        const Index s = unused_.back();
        slots_.emplace(id, s);
        unused_.pop_back();
        sequences_[s].id = id, sequences_[s].born = num_born_++;
        return s;
    }
    Index new_node(const Node& node) {  // `push` has made room
        if (free_ == NONE) {
            nodes_.push_back(node);
            return Index(nodes_.size() - 1);
        }
        const Index n = free_;
        free_ = nodes_[n].next, num_free_--;
        nodes_[n] = node;
        return n;
    }
    void release(Index n) {
        nodes_[n] = Node{};
        nodes_[n].next = free_;
        free_ = n, num_free_++;
    }
    bool evict(int64_t id) {  // finished ones first, then the oldest; `id`, which grows, last
        const auto order = [&](const Sequence& one) {
            return std::make_tuple(one.id == id, !one.finished, one.born);
        };
        Index victim = NONE;
        for (const auto& slot : slots_)
            if (victim == NONE || order(sequences_[slot.second]) < order(sequences_[victim])) victim = slot.second;
        if (victim == NONE) return false;
        erase(victim);
        num_evictions_++;
        return true;
    }

    // -- children

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
    void leave(Index n) {
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
    void grow_table(size_t extra) {
        if (2 * (num_entries_ + extra) <= table_.size()) return;
        size_t size = table_.size();
        while (size < 2 * (num_entries_ + extra)) size *= 2;
        std::vector<Index> before(size, NONE);
        before.swap(table_);
        num_entries_ = 0;
        for (const Index n : before)
            if (n != NONE) enter(n);
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
    void link(Index n) {
        const Index first = nodes_[nodes_[n].parent].first;
        if (first != NONE) {
            if (nodes_[first].next == NONE) enter(first);
            enter(n);
        }
        insert(n, first == NONE || leads(n, first) ? NONE : first);
    }
    void unlink(Index n) {
        const Index parent = nodes_[n].parent;
        if (has_siblings(n)) leave(n);
        const bool had = has_siblings(n);
        cut(n);
        if (had && has_one_child(parent)) leave(nodes_[parent].first);
    }
    void promote(Index n) {  // its count has grown
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

    // -- growth

    Index token_at(Index n, Index offset) const {
        return sequences_[nodes_[n].sequence].tokens[nodes_[n].start + offset];
    }
    void drop_first(Index n) {
        nodes_[n].start++, nodes_[n].length--;
        nodes_[n].token = token_at(n, 0);
    }
    Index split(Index n) {  // returns a new parent, with the first token of the edge
        Node upper = nodes_[n];
        upper.length = 1, upper.ends = 0, upper.first = n;
        const Index m = new_node(upper);
        replace(n, m);
        drop_first(n);
        nodes_[n].parent = m, nodes_[n].next = nodes_[n].previous = NONE;
        return m;
    }
    bool is_needless(Index n) const { return n != ROOT && nodes_[n].ends == 0 && has_one_child(n); }
    void merge(Index n) {  // into its only child, which keeps its number: suffixes end there
        const Index below = nodes_[n].first;
        nodes_[below].start -= nodes_[n].length, nodes_[below].length += nodes_[n].length;
        replace(n, below);
        release(n);
    }
    // Returns the node of a suffix that ended at `n`, after it has grown by the token at `position`.
    Index advance(Index n, Index s, Index position) {
        const Index token = sequences_[s].tokens[position];
        Index below = child(n, token);
        if (below == NONE && nodes_[n].count == 1 && n != ROOT) {  // the only occurrence grows
            nodes_[n].length++;
            return n;
        }
        nodes_[n].ends--;
        if (below == NONE) {
            Node leaf;
            leaf.parent = n, leaf.token = token;
            leaf.sequence = s, leaf.start = position, leaf.length = leaf.count = leaf.ends = 1;
            below = new_node(leaf);
            link(below);
            return below;
        }
        if (nodes_[below].length > 1) {
            if (is_needless(n)) {  // as a split and a merge, without a new node
                Node& node = nodes_[n];
                node.sequence = nodes_[below].sequence, node.start = nodes_[below].start - node.length;
                node.length++, node.ends++;
                drop_first(below);
                return n;
            }
            below = split(below);
        }
        nodes_[below].count++, nodes_[below].ends++;
        promote(below);
        if (is_needless(n)) merge(n);
        return below;
    }
    void push(Index s, Index token) {
        Sequence& sequence = sequences_[s];
        grow(nodes_, depth_), grow(sequence.tokens, 1), grow(sequence.ends, 1), grow_table(2 * depth_);
        // Nothing is thrown from here on.
        const Index last = Index(sequence.tokens.size());
        sequence.tokens.push_back(token), sequence.ends.push_back(ROOT);
        nodes_[ROOT].count++, nodes_[ROOT].ends++;
        for (Index i = std::max(0, last + 1 - depth_); i <= last; i++)
            sequence.ends[i] = advance(sequence.ends[i], s, last);
    }

    // -- removal

    void erase(Index s) {
        std::vector<bool> seen(nodes_.size());
        std::vector<Index> touched;
        touched.reserve(size_t(num_nodes()));
        for (Index n : sequences_[s].ends) {
            nodes_[n].ends--;
            for (; n != NONE; n = nodes_[n].parent) {
                nodes_[n].count--;
                if (!seen[n]) touched.push_back(n);
                seen[n] = true;
            }
        }
        slots_.erase(sequences_[s].id);
        if (slots_.empty()) return clear();
        const auto gone = std::partition(touched.begin(), touched.end(), [&](Index n) { return nodes_[n].count > 0; });
        std::for_each(gone, touched.end(), [&](Index n) { unlink(n); });
        std::for_each(gone, touched.end(), [&](Index n) { release(n); });
        touched.erase(gone, touched.end());
        for (const Index n : touched)  // the most frequent child may be another one
            for (Index one = nodes_[n].first, next; one != NONE; one = next) next = nodes_[one].next, promote(one);
        for (Index& n : touched)
            if (is_needless(n)) merge(n), n = ROOT;
        refer_elsewhere(s, touched);
        unused_.push_back(s);
        sequences_[s] = Sequence{};
    }
    // Edges that are spans of `s` become spans of others: where a suffix of another one ends, and above by the child.
    void refer_elsewhere(Index s, const std::vector<Index>& touched) {
        for (const auto& slot : slots_) {
            const Sequence& other = sequences_[slot.second];
            const Index size = Index(other.tokens.size());
            for (Index i = 0; i < size; i++) {
                Node& node = nodes_[other.ends[i]];
                if (node.sequence == s) node.sequence = slot.second, node.start = std::min(i + depth_, size) - node.length;
            }
        }
        for (const Index top : touched) {
            Index n = top;
            while (nodes_[n].sequence == s) n = nodes_[n].first;
            for (; n != top; n = nodes_[n].parent) {
                Node& above = nodes_[nodes_[n].parent];
                above.sequence = nodes_[n].sequence, above.start = nodes_[n].start - above.length;
            }
        }
    }

    // -- drafts

    Place walk(const Index* pattern, Index size) const {
        Place at{ROOT, 0, size};
        for (Index i = 0; i < size; i++) {
            if (at.offset < nodes_[at.node].length) {
                if (token_at(at.node, at.offset) != pattern[i]) return {NONE, 0, 0};
                at.offset++;
            } else {
                at.node = child(at.node, pattern[i]), at.offset = 1;
                if (at.node == NONE) return at;
            }
        }
        return at;
    }
    Index best_count(const Place& at) const {
        if (at.node == NONE) return 0;
        const Node& node = nodes_[at.node];
        return at.offset < node.length ? node.count : node.first == NONE ? 0 : nodes_[node.first].count;
    }
    Place match(int64_t id, const Index* pattern, Index size, const Arguments& arguments) const;
    // A path as long as the tree is deep, without its first token: one step along the sequence of its edge.
    Place shorten(const Place& at) const {
        const Node& node = nodes_[at.node];
        const Sequence& sequence = sequences_[node.sequence];
        const Index start = node.start + node.length - depth_ + 1, n = sequence.ends[start];
        const bool whole = start + depth_ > Index(sequence.tokens.size());  // the sequence ends with the path
        if (!whole && nodes_[n].length == 1) return {nodes_[n].parent, nodes_[nodes_[n].parent].length, depth_ - 1};
        return {n, nodes_[n].length - !whole, depth_ - 1};
    }
    void extend(const Path& path, Index rank, const Arguments& arguments) {
        const auto add = [&](Index token, Index n, Index offset, Index among, const Place& at) {
            const double score = path.score * (double(nodes_[n].count) / double(among));
            if (nodes_[n].count >= arguments.min_count && score >= arguments.min_probability)
                candidates_.push_back({score, rank, token, path.step, false, {n, offset, at.depth + 1}});
        };
        const Place at = path.at.depth == depth_ ? shorten(path.at) : path.at;
        const Node& node = nodes_[at.node];
        if (at.offset < node.length) return add(token_at(at.node, at.offset), at.node, at.offset + 1, node.count, at);
        for (Index n = node.first; n != NONE; n = arguments.top_k == 1 ? NONE : nodes_[n].next)
            add(nodes_[n].token, n, 1, node.count - node.ends, at);
    }
};

// The place of the longest suffix of the pattern that continues often enough. A shorter one does then, too.
Place Tree::match(int64_t id, const Index* pattern, Index size, const Arguments& arguments) const {
    const Index s = find(id);
    const Sequence* own = s == NONE ? nullptr : &sequences_[s];
    const Index length = own ? Index(own->tokens.size()) : 0;
    Index high = std::min({arguments.pattern_max, pattern ? size : length, depth_ - 1}), low = arguments.pattern_min;
    if (pattern && (high > length || !std::equal(pattern + size - high, pattern + size, own->tokens.end() - high)))
        own = nullptr;  // the pattern is not the end of the sequence, where suffixes are known
    Place found{NONE, 0, 0};
    while (low <= high) {
        const Index middle = low + (high - low) / 2;
        Place at;
        if (own) {
            const Index n = own->ends[length - middle];
            at = {n, nodes_[n].length, middle};
        } else {
            at = walk(pattern + size - middle, middle);
        }
        if (best_count(at) >= arguments.min_count)
            found = at, low = middle + 1;
        else
            high = middle - 1;
    }
    return found;
}

// Returns the number of paths, which are then in `paths_`; a path's last token is `steps_[path.step]`.
Index Tree::speculate(int64_t id, const Index* pattern, Index size, const Arguments& arguments) {
    paths_.clear(), steps_.clear();
    const Place from = match(id, pattern, size, arguments);
    if (from.node == NONE) return 0;
    paths_.push_back({1.0, 0, NONE, NONE, false, from});
    for (Index drafted = 0, grown = 1; drafted < arguments.max_tokens && grown; drafted++) {
        candidates_.clear(), grown = 0;
        for (Index rank = 0; rank < Index(paths_.size()); rank++) {
            Path& path = paths_[rank];
            const size_t before = candidates_.size();
            if (!path.done) extend(path, rank, arguments);
            if (candidates_.size() > before) continue;
            path.done = true, path.rank = rank, path.token = NONE;
            if (path.step != NONE) candidates_.push_back(path);
        }
        const size_t kept = std::min(candidates_.size(), size_t(arguments.top_k));
        std::partial_sort(candidates_.begin(), candidates_.begin() + kept, candidates_.end());
        candidates_.resize(kept, Path{});
        for (Path& path : candidates_) {
            if (path.done) continue;
            steps_.push_back({path.token, path.step});
            path.step = Index(steps_.size() - 1), grown++;
        }
        paths_.swap(candidates_);
    }
    return Index(paths_.size());
}

// Returns 0, or the number of the first check that fails.
int Tree::check() const {
    std::vector<Index> counts(nodes_.size()), ends(nodes_.size());
    for (const auto& slot : slots_) {
        const Sequence& sequence = sequences_[slot.second];
        const Index size = Index(sequence.tokens.size());
        if (sequence.id != slot.first || sequence.ends.size() != sequence.tokens.size()) return 1;
        for (Index i = 0; i < size; i++) {
            Index n = sequence.ends[i], stop = std::min(i + depth_, size);
            ends[n]++;
            for (; n != ROOT; n = nodes_[n].parent) {
                const Node& node = nodes_[n];
                if (node.sequence < 0 || node.sequence >= Index(sequences_.size())) return 2;
                const std::vector<Index>& tokens = sequences_[node.sequence].tokens;
                if (node.start < 0 || node.start + node.length > Index(tokens.size())) return 3;
                counts[n]++, stop -= node.length;
                const auto span = tokens.begin() + node.start;
                if (node.length < 1 || stop < i || node.token != *span) return 4;
                if (!std::equal(span, span + node.length, sequence.tokens.begin() + stop)) return 5;
            }
            counts[ROOT]++;
            if (stop != i) return 6;
        }
    }
    size_t reached = 1, entered = 0;
    for (Index n = 0; n < Index(nodes_.size()); n++) {
        if (counts[n] != nodes_[n].count || ends[n] != nodes_[n].ends) return 7;
        if (counts[n] == 0 && n != ROOT) continue;
        if (is_needless(n)) return 8;
        Index below = nodes_[n].ends;
        for (Index one = nodes_[n].first, previous = NONE; one != NONE; previous = one, one = nodes_[one].next) {
            if (nodes_[one].parent != n || nodes_[one].previous != previous || child(n, nodes_[one].token) != one) return 9;
            if (one != nodes_[n].first && leads(one, nodes_[n].first)) return 10;
            below += nodes_[one].count, reached++, entered += has_siblings(one);
        }
        if (below != counts[n]) return 11;
    }
    return reached != size_t(num_nodes()) ? 12 : entered != num_entries_ ? 13 : 0;
}

template <class T>
bool are_tokens(const T* values, int64_t size) {
    return std::all_of(values, values + size, [](T one) { return one >= 0 && one <= T(INT32_MAX); });
}

}  // namespace

constexpr int DONE = 0, BAD_TOKEN = 1, NO_MEMORY = 2;

extern "C" Tree* suffix_tree_make(int32_t depth, int64_t max_bytes) {
    try {
        return new Tree(depth, max_bytes);
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}

extern "C" void suffix_tree_free(Tree* tree) { delete tree; }

// `width` is the size of a token in bytes: 4 or 8.
extern "C" int suffix_tree_append(Tree* tree, int64_t id, const void* tokens, int64_t width, int64_t size) {
    const auto append = [&](const auto* values) {
        if (!are_tokens(values, size)) return BAD_TOKEN;
        tree->append(id, values, size);
        return DONE;
    };
    try {
        return width == 4 ? append(static_cast<const int32_t*>(tokens)) : append(static_cast<const int64_t*>(tokens));
    } catch (const std::bad_alloc&) {
        return NO_MEMORY;
    }
}

extern "C" int suffix_tree_remove(Tree* tree, int64_t id) {
    try {
        tree->remove(id);
        return DONE;
    } catch (const std::bad_alloc&) {
        return NO_MEMORY;
    }
}

extern "C" void suffix_tree_finish(Tree* tree, int64_t id) { tree->finish(id); }
extern "C" int64_t suffix_tree_length(const Tree* tree, int64_t id) { return tree->length(id); }
extern "C" int64_t suffix_tree_num_tokens(const Tree* tree) { return tree->num_tokens(); }
extern "C" int64_t suffix_tree_num_bytes(const Tree* tree) { return tree->num_bytes(); }
extern "C" int64_t suffix_tree_num_evictions(const Tree* tree) { return tree->num_evictions(); }

extern "C" int suffix_tree_check(const Tree* tree) {
    try {
        return tree->check();
    } catch (const std::bad_alloc&) {
        return -NO_MEMORY;
    }
}

// Drafts for `size` requests: shapes and meaning are those of `batch_speculate` in Python.
extern "C" int suffix_tree_speculate(Tree* const* trees, const int64_t* ids, int64_t size, const void* patterns,
                                     int64_t width, const int64_t* starts, const int64_t* stops,
                                     const Arguments* arguments, void* tokens, int64_t token_width, int32_t* lengths,
                                     double* scores, int64_t num_paths, int64_t num_tokens) {
    try {
        std::vector<Index> pattern;
        for (int64_t i = 0; i < size; i++) {
            if (patterns != nullptr) {
                const int64_t first = std::max(starts[i], stops[i] - arguments[i].pattern_max);
                pattern.resize(size_t(stops[i] - first + 1));  // one more: never without an address
                for (int64_t j = first; j < stops[i]; j++) {
                    const int64_t token = width == 4 ? static_cast<const int32_t*>(patterns)[j]
                                                     : static_cast<const int64_t*>(patterns)[j];
                    pattern[size_t(j - first)] = token < 0 || token > INT32_MAX ? NONE : Index(token);
                }
            }
            const Index found = trees[i]->speculate(ids[i], patterns == nullptr ? nullptr : pattern.data(),
                                                    Index(pattern.size()) - 1, arguments[i]);
            for (int64_t k = 0; k < num_paths; k++) {
                const int64_t row = i * num_paths + k;
                lengths[row] = 0, scores[row] = 0;
                if (k >= found) continue;
                const std::vector<Step>& steps = trees[i]->steps();
                const Path& path = trees[i]->paths()[size_t(k)];
                scores[row] = path.score;
                for (Index step = path.step; step != NONE; step = steps[size_t(step)].before) lengths[row]++;
                int64_t to = row * num_tokens + lengths[row] - 1;
                for (Index step = path.step; step != NONE; step = steps[size_t(step)].before, to--) {
                    if (token_width == 4)
                        static_cast<int32_t*>(tokens)[to] = steps[size_t(step)].token;
                    else
                        static_cast<int64_t*>(tokens)[to] = steps[size_t(step)].token;
                }
            }
        }
        return DONE;
    } catch (const std::bad_alloc&) {
        return NO_MEMORY;
    }
}
