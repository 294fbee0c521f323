// What will happen when, on the one logical clock of a simulation. Of things at the same time, the one that was added first goes first.
#pragma once

#include <functional>
#include <limits>
#include <map>

namespace kvstrata::testing {

class Agenda {
   public:
    double now() const { return now_; }
    void at(double time, std::function<void()> what) { events_.emplace(time < now_ ? now_ : time, std::move(what)); }
    void after(double delay, std::function<void()> what) { at(now_ + delay, std::move(what)); }
    double next() const { return events_.empty() ? std::numeric_limits<double>::infinity() : events_.begin()->first; }
    bool empty() const { return events_.empty(); }
    void pass_to(double time) { now_ = time; }
    void run_next() {
        auto first = events_.extract(events_.begin());
        now_ = first.key();
        first.mapped()();
    }
    void clear() { events_.clear(); }

   private:
    std::multimap<double, std::function<void()>> events_;
    double now_ = 1000;
};

}  // namespace kvstrata::testing
