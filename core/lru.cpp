// Least recently used, leaf first. A page counts as used whenever a page below it is: only the deepest page of a use is stamped, and
// a page that leaves hands its stamp up to its parent. So a use costs one write, whatever its length.
#include <algorithm>
#include <array>
#include <vector>

#include "policy.hpp"

namespace kvstrata {
namespace {

class Lru final : public Policy {
   public:
    void used(Tier tier, std::uint32_t id, double) override { stamp(order(tier), id, ++tick_); }

    void inserted(Tier tier, std::uint32_t id, std::uint32_t, double) override { stamp(order(tier), id, ++tick_); }

    void removed(Tier tier, std::uint32_t id, std::uint32_t parent) override {
        Order& in = order(tier);
        if (parent != kNobody) stamp(in, parent, std::max(in.at(parent).stamp, in.at(id).stamp));
    }

    void enter(Tier tier, std::uint32_t id) override {
        Order& in = order(tier);
        in.at(id).place = static_cast<std::uint32_t>(in.heap.size());
        in.heap.push_back(id);
        in.up(in.heap.size() - 1);
    }

    void leave(Tier tier, std::uint32_t id) override {
        Order& in = order(tier);
        const std::size_t place = in.at(id).place;
        const std::uint32_t last = in.heap.back();
        in.heap.pop_back();
        in.at(id).place = kNobody;
        if (last == id) return;
        in.put(place, last);
        in.up(place);
        in.down(in.at(last).place);
    }

    std::uint32_t victim(Tier tier, double) override {
        const Order& in = order(tier);
        return in.heap.empty() ? kNobody : in.heap.front();
    }

    std::size_t candidates(Tier tier) const override { return orders_[static_cast<std::size_t>(tier)].heap.size(); }

   private:
    struct Place {
        std::uint64_t stamp = 0;
        std::uint32_t place = kNobody;  // in the heap
    };
    // A 4-ary heap of candidates, oldest stamp first.
    struct Order {
        std::vector<Place> places;
        std::vector<std::uint32_t> heap;

        Place& at(std::uint32_t id) {
            if (id >= places.size()) places.resize(id + id / 4 + 64);
            return places[id];
        }
        std::uint64_t key(std::size_t i) const { return places[heap[i]].stamp; }
        void put(std::size_t i, std::uint32_t id) {
            heap[i] = id;
            places[id].place = static_cast<std::uint32_t>(i);
        }
        void up(std::size_t i) {
            const std::uint32_t id = heap[i];
            const std::uint64_t stamp = places[id].stamp;
            for (; i > 0; i = (i - 1) / 4) {
                const std::size_t above = (i - 1) / 4;
                if (key(above) <= stamp) break;
                put(i, heap[above]);
            }
            put(i, id);
        }
        void down(std::size_t i) {
            const std::uint32_t id = heap[i];
            const std::uint64_t stamp = places[id].stamp;
            for (;;) {
                const std::size_t first = 4 * i + 1;
                if (first >= heap.size()) break;
                std::size_t least = first;
                for (std::size_t c = first + 1; c < std::min(first + 4, heap.size()); ++c)
                    if (key(c) < key(least)) least = c;
                if (key(least) >= stamp) break;
                put(i, heap[least]);
                i = least;
            }
            put(i, id);
        }
    };

    Order& order(Tier tier) { return orders_[static_cast<std::size_t>(tier)]; }

    static void stamp(Order& in, std::uint32_t id, std::uint64_t stamp) {
        Place& at = in.at(id);
        if (at.stamp == stamp) return;
        at.stamp = stamp;  // stamps only grow, so a candidate can only sink
        if (at.place != kNobody) in.down(at.place);
    }

    std::array<Order, kTiers> orders_;
    std::uint64_t tick_ = 0;
};

}  // namespace

std::unique_ptr<Policy> make_lru() { return std::make_unique<Lru>(); }

}  // namespace kvstrata
