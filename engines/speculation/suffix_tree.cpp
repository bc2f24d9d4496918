// The suffix tree of `suffix_tree.py`, whose docstring defines what it holds and what a draft is. A node stands where
// paths part or a suffix ends, and nowhere else. Therefore all paths along an edge have the same count, and the tree's
// shape depends on its content alone.

#include <algorithm>
#include <cstdint>
#include <exception>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "suffix_nodes.h"

namespace {

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

struct Path {  // of a beam search: `rank` is that of its first `length` - 1 tokens, or of all if it is done
    double score;
    Index rank, token, length;
    bool done;
    Place at;
    bool operator<(const Path& other) const {
        if (score != other.score) return score > other.score;
        return rank != other.rank ? rank < other.rank : token < other.token;
    }
};

struct Drafted {  // a token of a path, and the probability of the path up to it
    Index token;
    double probability;
};

constexpr int64_t MOST_TOKENS = 1 << 30;  // a node per token and as many above them have an Index
constexpr int64_t NODE_BYTES = sizeof(Node) + 2 * sizeof(Index), TOKEN_BYTES = 2 * sizeof(Index), SEQUENCE_BYTES = 128;

class Tree {
 public:
    Tree(Index depth, int64_t max_bytes) : depth_(depth), max_bytes_(max_bytes) {}

    int64_t num_tokens() const { return nodes_[ROOT].count; }
    int64_t num_evictions() const { return num_evictions_; }
    int64_t num_bytes() const {
        const size_t fixed = nodes_.num_used() * NODE_BYTES + slots_.size() * SEQUENCE_BYTES;
        return int64_t(fixed) + num_tokens() * TOKEN_BYTES;
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
    const Path& path(Index rank) const { return paths_[rank]; }
    const Drafted* draft(Index rank, const Arguments& arguments) const { return &drafts_[rank * arguments.max_tokens]; }
    int check() const;

 private:
    const Index depth_;
    const int64_t max_bytes_;
    int64_t num_evictions_ = 0, num_born_ = 0;
    Nodes nodes_;
    std::vector<Sequence> sequences_;
    std::vector<Index> unused_;  // places in `sequences_`
    std::unordered_map<int64_t, Index> slots_;
    // Of one call of `speculate`; kept so that most calls allocate nothing. Tokens are [paths, max_tokens].
    std::vector<Path> paths_, candidates_;
    std::vector<Drafted> drafts_, longer_;

    // -- memory

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
    bool evict(int64_t id) {  // finished ones first, then the oldest; `id`, which grows, last
        const auto order = [&](const Sequence& one) { return std::make_tuple(one.id == id, !one.finished, one.born); };
        Index victim = NONE;
        for (const auto& slot : slots_)
            if (victim == NONE || order(sequences_[slot.second]) < order(sequences_[victim])) victim = slot.second;
        if (victim == NONE) return false;
        erase(victim);
        num_evictions_++;
        return true;
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
        const Index m = nodes_.make(upper);
        nodes_.replace(n, m);
        drop_first(n);
        nodes_[n].parent = m, nodes_[n].next = nodes_[n].previous = NONE;
        return m;
    }
    bool is_needless(Index n) const { return n != ROOT && nodes_[n].ends == 0 && nodes_.has_one_child(n); }
    void merge(Index n) {  // into its only child, which keeps its number: suffixes end there
        const Index below = nodes_[n].first;
        nodes_[below].start -= nodes_[n].length, nodes_[below].length += nodes_[n].length;
        nodes_.replace(n, below);
        nodes_.release(n);
    }
    // Returns the node of a suffix that ended at `n`, after it has grown by the token at `position`.
    Index advance(Index n, Index s, Index position) {
        const Index token = sequences_[s].tokens[position];
        Index below = nodes_.child(n, token);
        if (below == NONE && nodes_[n].count == 1 && n != ROOT) {  // the only occurrence grows
            nodes_[n].length++;
            return n;
        }
        nodes_[n].ends--;
        if (below == NONE) {
            Node leaf;
            leaf.parent = n, leaf.token = token;
            leaf.sequence = s, leaf.start = position, leaf.length = leaf.count = leaf.ends = 1;
            below = nodes_.make(leaf);
            nodes_.link(below);
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
        nodes_.promote(below);
        if (is_needless(n)) merge(n);
        return below;
    }
    void push(Index s, Index token) {
        Sequence& sequence = sequences_[s];
        grow(sequence.tokens, 1), grow(sequence.ends, 1), nodes_.reserve(depth_);
        // Nothing is thrown from here on.
        const Index last = Index(sequence.tokens.size());
        sequence.tokens.push_back(token), sequence.ends.push_back(ROOT);
        nodes_[ROOT].count++, nodes_[ROOT].ends++;
        for (Index i = std::max(0, last + 1 - depth_); i <= last; i++)
            sequence.ends[i] = advance(sequence.ends[i], s, last);
    }

    // -- removal

    void erase(Index s) {
        slots_.erase(sequences_[s].id);
        if (slots_.empty()) {  // gives all memory back
            nodes_ = {}, sequences_ = {}, unused_ = {}, slots_ = {};
            return;
        }
        std::vector<bool> seen(nodes_.size());
        std::vector<Index> touched;
        touched.reserve(nodes_.num_used());
        for (Index n : sequences_[s].ends) {
            nodes_[n].ends--;
            for (; n != NONE; n = nodes_[n].parent) {
                nodes_[n].count--;
                if (!seen[n]) touched.push_back(n);
                seen[n] = true;
            }
        }
        const auto gone = std::partition(touched.begin(), touched.end(), [&](Index n) { return nodes_[n].count > 0; });
        std::for_each(gone, touched.end(), [&](Index n) { nodes_.unlink(n); });
        std::for_each(gone, touched.end(), [&](Index n) { nodes_.release(n); });
        touched.erase(gone, touched.end());
        for (const Index n : touched)  // the most frequent child may be another one
            for (Index one = nodes_[n].first, next; one != NONE; one = next) {
                next = nodes_[one].next;
                nodes_.promote(one);
            }
        for (Index& n : touched)
            if (is_needless(n)) merge(n), n = ROOT;
        refer_elsewhere(s, touched);
        sequences_[s] = Sequence{};
        unused_.push_back(s);
    }
    // Edges that are spans of `s` become spans of others: where a suffix of another one ends, and above by the child.
    void refer_elsewhere(Index s, const std::vector<Index>& touched) {
        for (const auto& slot : slots_) {
            const Sequence& other = sequences_[slot.second];
            const Index size = Index(other.tokens.size());
            for (Index i = 0; i < size; i++) {
                Node& node = nodes_[other.ends[i]];
                if (node.sequence != s) continue;
                node.sequence = slot.second, node.start = std::min(i + depth_, size) - node.length;
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
                at.node = nodes_.child(at.node, pattern[i]), at.offset = 1;
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
                candidates_.push_back({score, rank, token, path.length + 1, false, {n, offset, at.depth + 1}});
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
    const bool is_end = own && high <= length &&
                        (!pattern || std::equal(pattern + size - high, pattern + size, own->tokens.end() - high));
    Place found{NONE, 0, 0};
    while (low <= high) {
        const Index middle = low + (high - low) / 2;
        Place at;
        if (is_end) {  // the nodes of the suffixes are known
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

// Returns the number of paths, which `path` and `draft` then return.
Index Tree::speculate(int64_t id, const Index* pattern, Index size, const Arguments& arguments) {
    const size_t width = size_t(arguments.max_tokens);
    paths_.assign(1, {1.0, 0, NONE, 0, false, match(id, pattern, size, arguments)});
    if (paths_[0].at.node == NONE) paths_.clear();
    for (Index drafted = 0, grown = 1; drafted < arguments.max_tokens && grown; drafted++) {
        candidates_.clear(), grown = 0;
        for (Index rank = 0; rank < Index(paths_.size()); rank++) {
            Path& path = paths_[rank];
            const size_t before = candidates_.size();
            if (!path.done) extend(path, rank, arguments);
            if (candidates_.size() > before) continue;
            path.done = true, path.rank = rank, path.token = NONE;
            if (path.length > 0) candidates_.push_back(path);
        }
        const size_t kept = std::min(candidates_.size(), size_t(arguments.top_k));
        std::partial_sort(candidates_.begin(), candidates_.begin() + kept, candidates_.end());
        candidates_.resize(kept, Path{});
        longer_.resize(kept * width), drafts_.resize(std::max(drafts_.size(), width));
        for (size_t i = 0; i < kept; i++) {
            const Path& path = candidates_[i];
            std::copy_n(drafts_.begin() + path.rank * width, path.length - !path.done, longer_.begin() + i * width);
            if (path.done) continue;
            longer_[i * width + path.length - 1] = {path.token, path.score}, grown++;
        }
        paths_.swap(candidates_), drafts_.swap(longer_);
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
        const Index first = nodes_[n].first;
        for (Index one = first, previous = NONE; one != NONE; previous = one, one = nodes_[one].next) {
            const Node& node = nodes_[one];
            if (node.parent != n || node.previous != previous || nodes_.child(n, node.token) != one) return 9;
            if (one != first && nodes_.leads(one, first)) return 10;
            below += node.count, reached++, entered += nodes_.has_siblings(one);
        }
        if (below != counts[n]) return 11;
    }
    return reached != nodes_.num_used() ? 12 : entered != nodes_.num_entries() ? 13 : 0;
}

constexpr int DONE = 0, BAD_TOKEN = 1, NO_MEMORY = 2;

template <class Call>
int guarded(Call call) {
    try {
        return call();
    } catch (const std::exception&) {
        return NO_MEMORY;
    }
}

}  // namespace

extern "C" Tree* suffix_tree_make(int32_t depth, int64_t max_bytes) {
    Tree* tree = nullptr;
    guarded([&] { return tree = new Tree(depth, max_bytes), DONE; });
    return tree;
}
extern "C" void suffix_tree_free(Tree* tree) { delete tree; }
extern "C" void suffix_tree_finish(Tree* tree, int64_t id) { tree->finish(id); }
extern "C" int suffix_tree_remove(Tree* tree, int64_t id) {
    return guarded([&] { return tree->remove(id), DONE; });
}
extern "C" int64_t suffix_tree_length(const Tree* tree, int64_t id) { return tree->length(id); }
extern "C" int64_t suffix_tree_num_tokens(const Tree* tree) { return tree->num_tokens(); }
extern "C" int64_t suffix_tree_num_bytes(const Tree* tree) { return tree->num_bytes(); }
extern "C" int64_t suffix_tree_num_evictions(const Tree* tree) { return tree->num_evictions(); }
extern "C" int suffix_tree_check(const Tree* tree) {
    return guarded([&] { return tree->check(); });
}

// `width` is the size of a token in bytes: 4 or 8.
extern "C" int suffix_tree_append(Tree* tree, int64_t id, const void* tokens, int64_t width, int64_t size) {
    const auto append = [&](const auto* values) {
        if (!std::all_of(values, values + size, [](int64_t one) { return one >= 0 && one <= INT32_MAX; }))
            return BAD_TOKEN;
        return tree->num_tokens() + size > MOST_TOKENS ? NO_MEMORY : (tree->append(id, values, size), DONE);
    };
    return guarded([&] {
        return width == 4 ? append(static_cast<const int32_t*>(tokens)) : append(static_cast<const int64_t*>(tokens));
    });
}

// Drafts for `size` requests: shapes and meaning are those of `batch_speculate` in Python.
extern "C" int suffix_tree_speculate(Tree* const* trees, const int64_t* ids, int64_t size, const void* patterns,
                                     int64_t width, const int64_t* starts, const int64_t* stops,
                                     const Arguments* arguments, int32_t* tokens, int32_t* lengths,
                                     double* probabilities, int64_t num_paths, int64_t num_tokens) {
    std::vector<Index> pattern;
    const auto read = [&](const auto* from, int64_t start, int64_t stop) {
        pattern.assign(1, NONE);  // so that it has an address
        for (; start < stop; start++) pattern.push_back(from[start] == Index(from[start]) ? Index(from[start]) : NONE);
    };
    const auto draft = [&](int64_t i) {
        if (patterns != nullptr) {
            const int64_t start = std::max(starts[i], stops[i] - arguments[i].pattern_max);
            if (width == 4) read(static_cast<const int32_t*>(patterns), start, stops[i]);
            if (width == 8) read(static_cast<const int64_t*>(patterns), start, stops[i]);
        }
        Tree& tree = *trees[i];
        const Index* from = patterns == nullptr ? nullptr : pattern.data() + 1;
        const Index found = tree.speculate(ids[i], from, Index(pattern.size()) - 1, arguments[i]);
        std::fill_n(lengths + i * num_paths, num_paths, 0);
        for (Index k = 0; k < found; k++) {
            const int64_t row = i * num_paths + k;
            lengths[row] = tree.path(k).length;
            const Drafted* path = tree.draft(k, arguments[i]);
            for (int64_t j = 0, to = row * num_tokens; j < lengths[row]; j++, to++) {
                tokens[to] = path[j].token, probabilities[to] = path[j].probability;
            }
        }
    };
    return guarded([&] {
        for (int64_t i = 0; i < size; i++) draft(i);
        return DONE;
    });
}
