#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <optional>

#include "../policy.hpp"
#include "dice.hpp"

using namespace kvstrata;
using namespace kvstrata::testing;

namespace {

// What the policy promises, done the slow way: a use of a page is a use of everything above it, and of the pages that may go, the one
// whose last use is longest ago goes first.
class NaiveLru {
   public:
    void use(std::uint32_t id) {
        ++time_;
        for (std::uint32_t at = id; at != kNobody; at = pages_.at(at).parent) pages_.at(at).last_use = time_;
    }
    void insert(std::uint32_t id, std::uint32_t parent) {
        pages_[id] = {parent, 0, false};
        use(id);
    }
    void remove(std::uint32_t id) { pages_.erase(id); }
    void set_candidate(std::uint32_t id, bool may_go) { pages_.at(id).candidate = may_go; }
    std::uint32_t victim() const {
        std::uint32_t oldest = kNobody;
        for (const auto& [id, page] : pages_)
            if (page.candidate && (oldest == kNobody || page.last_use < pages_.at(oldest).last_use)) oldest = id;
        return oldest;
    }
    bool has(std::uint32_t id) const { return pages_.contains(id); }
    bool leaf(std::uint32_t id) const {
        return std::none_of(pages_.begin(), pages_.end(), [&](const auto& entry) { return entry.second.parent == id; });
    }
    std::uint32_t parent(std::uint32_t id) const { return pages_.at(id).parent; }
    bool candidate(std::uint32_t id) const { return pages_.at(id).candidate; }
    std::vector<std::uint32_t> ids() const {
        std::vector<std::uint32_t> all;
        for (const auto& [id, page] : pages_) all.push_back(id);
        return all;
    }

   private:
    struct Page {
        std::uint32_t parent;
        std::uint64_t last_use;
        bool candidate;
    };
    std::map<std::uint32_t, Page> pages_;
    std::uint64_t time_ = 0;
};

// Both at once, as the ledger uses a policy: leaves may go, unless somebody holds them.
class Pair {
   public:
    explicit Pair(Tier tier) : tier_(tier), lru_(make_lru()) {}

    void insert(std::uint32_t id, std::uint32_t parent) {
        if (parent != kNobody) free(parent, false);
        lru_->inserted(tier_, id, parent, 0);
        naive_.insert(id, parent);
        free(id, true);
    }
    void use(std::uint32_t id) {
        lru_->used(tier_, id, 0);
        naive_.use(id);
    }
    void free(std::uint32_t id, bool may_go) {
        if (naive_.candidate(id) == may_go) return;
        naive_.set_candidate(id, may_go);
        may_go ? lru_->enter(tier_, id) : lru_->leave(tier_, id);
    }
    void remove(std::uint32_t id) {
        free(id, false);
        const std::uint32_t parent = naive_.parent(id);
        lru_->removed(tier_, id, parent);
        naive_.remove(id);
        if (parent != kNobody && naive_.leaf(parent)) free(parent, true);
    }
    std::uint32_t victim() const {
        const std::uint32_t chosen = lru_->victim(tier_, 0);
        REQUIRE(chosen == naive_.victim());
        return chosen;
    }
    // Removes everything; the order in which it went.
    std::vector<std::uint32_t> drain() {
        std::vector<std::uint32_t> order;
        for (std::uint32_t id = victim(); id != kNobody; id = victim()) {
            order.push_back(id);
            remove(id);
        }
        CHECK(lru_->candidates(tier_) == 0);
        return order;
    }
    const NaiveLru& naive() const { return naive_; }

   private:
    Tier tier_;
    std::unique_ptr<Policy> lru_;
    NaiveLru naive_;
};

using Order = std::vector<std::uint32_t>;

}  // namespace

TEST_CASE("lru: the page unused for longest goes first") {
    Pair pages(Tier::gpu);
    for (std::uint32_t id = 1; id <= 4; ++id) pages.insert(id, kNobody);
    pages.use(1);
    pages.use(3);
    CHECK(pages.drain() == Order{2, 4, 1, 3});
}

TEST_CASE("lru: leaves go before what is above them, and a use of a leaf is a use of its whole prefix") {
    Pair pages(Tier::cpu);
    pages.insert(1, kNobody);
    pages.insert(2, 1);
    pages.insert(3, 2);
    pages.insert(9, kNobody);
    pages.use(3);  // after 9 came: 1, 2 and 3 are younger than 9
    CHECK(pages.drain() == Order{9, 3, 2, 1});
}

TEST_CASE("lru: a page that goes hands its last use up") {
    Pair pages(Tier::disk);
    pages.insert(1, kNobody);
    pages.insert(2, 1);
    pages.insert(3, 1);
    pages.insert(4, kNobody);
    pages.use(2);
    pages.insert(5, kNobody);
    CHECK(pages.drain() == Order{3, 4, 2, 1, 5});  // 1 was last used with 2, which was after 4 came
}

TEST_CASE("lru: what is held is passed over and keeps its place") {
    Pair pages(Tier::gpu);
    for (std::uint32_t id = 0; id < 5; ++id) pages.insert(id, kNobody);
    pages.free(0, false);
    CHECK(pages.victim() == 1);
    pages.use(1);
    CHECK(pages.victim() == 2);
    pages.free(0, true);
    CHECK(pages.drain() == Order{0, 2, 3, 4, 1});
}

TEST_CASE("lru: tiers do not know each other") {
    const auto lru = make_lru();
    lru->inserted(Tier::gpu, 7, kNobody, 0);
    lru->inserted(Tier::cpu, 7, kNobody, 0);
    lru->enter(Tier::gpu, 7);
    CHECK(lru->victim(Tier::gpu, 0) == 7);
    CHECK(lru->victim(Tier::cpu, 0) == kNobody);
    CHECK(lru->candidates(Tier::disk) == 0);
}

TEST_CASE("lru: exact order over random lives of a tree") {
    for (std::uint64_t seed = 1; seed <= 30; ++seed) {
        CAPTURE(seed);
        Dice dice(seed);
        Pair pages(Tier::gpu);
        for (int step = 0; step < 1500; ++step) {
            const Order ids = pages.naive().ids();
            const auto what = dice.below(10);
            if (what < 3 || ids.empty()) {  // ids are used again, as records are
                const std::uint32_t id = dice.below(60);
                if (!pages.naive().has(id)) pages.insert(id, ids.empty() || dice.chance(0.2) ? kNobody : dice.pick(ids));
            } else if (what < 6) {
                pages.use(dice.pick(ids));
            } else if (what < 8) {
                const std::uint32_t id = dice.pick(ids);
                if (pages.naive().leaf(id)) pages.free(id, !pages.naive().candidate(id));
            } else if (const std::uint32_t id = pages.victim(); id != kNobody) {
                pages.remove(id);
            }
            pages.victim();
        }
        for (const std::uint32_t id : pages.naive().ids())
            if (pages.naive().leaf(id)) pages.free(id, true);
        pages.drain();
        CHECK(pages.naive().ids().empty());
    }
}
