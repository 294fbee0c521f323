#include "session.hpp"

#include <algorithm>
#include <cstdio>
#include <set>

namespace kvstrata::testing {
Session::Session(Simulation& world, Prompt prompt, bool plain) : world_(world), prompt_(std::move(prompt)), born_(world.now()) {
    for (const PageName& page : prompt_.pages()) world_.book().note(page);
    Dice& dice = world_.dice();
    const Setup& setup = world_.setup();
    LeaseRequest request{.space = prompt_.space(), .tokens = prompt_.tokens(), .media = prompt_.media()};
    request.multiple = setup.multiple;
    if (!plain) {
        request.reserve = dice.chance(0.5) ? dice.below(2 * setup.page_size() + 1) : 0;
        request.leave = dice.chance(0.8) ? 1 : dice.below(3);
        request.read = !dice.chance(0.2);
        request.write = write_ = !dice.chance(0.1);
    }

    const std::uint64_t size = setup.page_size(), length = prompt_.tokens().size();
    std::uint64_t limit = 0;
    if (request.read && length > request.leave) limit = (length - request.leave) / setup.multiple * setup.multiple / size;
    if (setup.guest())
        limit = std::min<std::uint64_t>(limit, setup.driver.ledger.cpu_rows * size / setup.multiple * setup.multiple / size);
    Expectation expected = world_.book().lookup(prompt_, static_cast<std::uint32_t>(limit), world_.now());
    const auto group = static_cast<std::uint32_t>(setup.multiple / size);
    expected.least = expected.least / group * group;
    expected.most = expected.most / group * group;

    const std::uint64_t total = (length + request.reserve + size - 1) / size;
    rows_ = total;
    // What could be had must be asked before: a lease changes it.
    std::vector<PageName> path(prompt_.pages().begin(), prompt_.pages().begin() + expected.most);
    const std::uint32_t room = setup.guest() ? 0 : world_.rows_to_be_had(path);
    std::uint64_t need = total;
    for (const PageName& page : path) {
        const PageId record = world_.page_of(page.key);
        if (record != kNoPage && world_.driver().ledger().forest().at(record).state[0] != Residency::none) --need;
    }
    const LeaseAnswer answer = world_.decide([&](Driver& driver, double now) { return driver.lease(now, request); });
    world_.tally().leases++;
    id_ = answer.id;
    std::string pages;
    for (const PageName& page : prompt_.pages()) {
        char text[8];
        std::snprintf(text, sizeof text, " %04x", name(page.key));
        pages += text;
    }
    world_.tell("lease %llu of %zu tokens + %llu, pages%s: matched %u of %u-%u", static_cast<unsigned long long>(id_), length,
                static_cast<unsigned long long>(request.reserve), pages.c_str(), id_ == 0 ? 0 : lease().matched, expected.least,
                expected.most);
    if (id_ == 0) {
        over_ = true;
        (answer.never ? world_.tally().never : world_.tally().full)++;
        require(!setup.guest(), "a guest's lease was refused");
        require(answer.never == (total > setup.driver.ledger.gpu_rows), "a lease was refused for ever, or not, wrongly");
        require(answer.never || answer.available < answer.needed,
                "a lease was refused although there was room, by its own account");
        if (!answer.never && expected.least == expected.most) require(need > room, "a lease was refused although there was room");
        return;
    }
    matched_ = hit_ = lease().matched;
    require(matched_ >= expected.least, "a lookup missed pages that are there");
    require(matched_ <= expected.most, "a lookup found pages that are not there");
    for (std::uint32_t i = 0; i < matched_; ++i) world_.book().await(prompt_.pages()[i].key, world_.now());
    require(setup.guest() || lease().rows.size() == total, "a lease has not the rows it asked for");
    look();
}

const Lease& Session::lease() const {
    const Lease* found = world_.driver().find(id_);
    require(found != nullptr, "a lease is gone that nobody released");
    return *found;
}

const std::vector<Row>& Session::rows() const {
    static const std::vector<Row> none;
    return over_ ? none : lease().rows;
}

bool Session::uses(const Key& page) const {
    if (over_ || id_ == 0 || !settled_) return false;
    const std::uint32_t pages = std::max(hit_, published_);
    return std::any_of(prompt_.pages().begin(), prompt_.pages().begin() + pages,
                       [&](const PageName& mine) { return mine.key == page; });
}

// --- what it watches

void Session::look() {
    if (over_) return;
    const Lease& held = lease();
    require(held.hit <= hit_, "a hit grew");
    if (!settled_) {
        hit_ = held.hit;
        if (held.settled) settle_in();
        const DriverConfig& driver = world_.setup().driver;
        require(settled_ || world_.now() - born_ < 40 * driver.read_deadline + 4 * driver.copy_deadline, "a lease waits for ever");
        if (!settled_) return;
    }
    require(held.hit == hit_, "a settled hit changed");
    check_rows(held);
    if (world_.setup().guest()) check_loads();
}

void Session::settle_in() {
    settled_ = true;
    require(hit_ % (world_.setup().multiple / world_.setup().page_size()) == 0, "a hit is no multiple of what is computed at once");
    world_.tell("lease %llu settled: %u of %u", static_cast<unsigned long long>(id_), hit_, matched_);
    computed_ = std::uint64_t{hit_} * world_.setup().page_size();
    published_ = hit_;
    world_.tally().settled++;
    for (std::uint32_t i = 0; i < hit_; ++i) world_.tally().hits[static_cast<int>(lease().source[i])]++;
    if (hit_ < matched_) {
        world_.tally().shortened++;
        check_excuse();
    }
}

// A hit may only become shorter for a reason.
void Session::check_excuse() const {
    if (gave_up_ || world_.pause_excuses(born_)) return;
    const std::uint32_t group = world_.setup().multiple / world_.setup().page_size();
    for (std::uint32_t i = hit_; i < hit_ + group; ++i) {
        const PageFacts& page = world_.book().at(prompt_.pages()[i].key);
        if (page.trouble_at >= born_ || page.awaited_since + world_.setup().driver.read_deadline <= world_.now()) return;
    }
    throw Broken("a hit became shorter without a reason");
}

void Session::check_rows(const Lease& held) const {
    const Forest& forest = world_.driver().ledger().forest();
    if (world_.setup().guest()) {
        for (std::uint32_t i = 0; i < hit_; ++i) {
            const PageRecord& record = forest.at(held.path[i]);
            const PageFacts& page = world_.book().at(prompt_.pages()[i].key);
            require(record.alive && record.key == page.name.key && record.state[1] == Residency::resident,
                    "a page of a settled lease is not in the slab");
            require(std::memcmp(world_.slab()->row(record.row[1]), page.bytes.data(), page.bytes.size()) == 0,
                    "a page in use was overwritten in the slab");
        }
        return;
    }
    std::set<Row> distinct;
    for (std::size_t i = 0; i < held.rows.size(); ++i) {
        const Row row = held.rows[i];
        if (row == kNoRow) {
            require(held.rows_lost, "a lease lacks a row and does not say so");
            continue;
        }
        require(row >= 1 && distinct.insert(row).second, "a lease holds a row twice, or the scratch row");
        if (i >= full_pages() || !world_.device().quiet(row)) continue;
        require(world_.device().holds(row, world_.book().at(prompt_.pages()[i].key).bytes),
                "a page in use was overwritten on the device");
    }
}

// --- what it does

void Session::act() {
    if (over_) return;
    if (!settled_) return act_unsettled();
    if (world_.setup().guest())
        act_guest();
    else
        act_own();
}

void Session::act_unsettled() {
    Dice& dice = world_.dice();
    if (world_.now() - born_ > world_.setup().patience || dice.chance(0.08)) {
        const int home = static_cast<int>(world_.driver().ledger().home());
        const std::uint32_t group = world_.setup().multiple / world_.setup().page_size();
        std::uint32_t there = 0;
        while (there < hit_ && world_.book().at(prompt_.pages()[there].key).in[home]) ++there;
        gave_up_ = true;
        world_.decide([&](Driver& driver, double now) { return driver.settle(now, id_), 0; });
        require(lease().hit >= there / group * group, "settling gave up pages that are there");
        look();
    } else if (dice.chance(0.12)) {
        world_.tally().cancelled++;
        release();
    } else if (dice.chance(0.1)) {
        const auto published =
            world_.decide([&](Driver& driver, double now) { return driver.publish(now, id_, prompt_.tokens().size(), 0); });
        require(published == 0, "a lease published before it was settled");
    } else if (dice.chance(0.1)) {
        generate();
    }
}

void Session::act_own() {
    Dice& dice = world_.dice();
    if (lease().rows_lost) {
        world_.tally().rows_lost++;
        return release();
    }
    const double what = dice.real(0, 1);
    if (what < 0.4)
        compute(dice.between(1, 3 * world_.setup().page_size()));
    else if (what < 0.65)
        publish(dice.chance(0.7) ? computed_ : dice.below(computed_ + 1));
    else if (what < 0.8)
        generate();
    else
        release();
}

void Session::compute(std::uint32_t tokens) {
    const std::uint64_t size = world_.setup().page_size();
    const Lease& held = lease();
    const std::uint64_t to =
        std::min({computed_ + tokens, std::uint64_t{prompt_.tokens().size()}, std::uint64_t{held.rows.size()} * size});
    if (to == computed_ || held.rows_lost) return;
    std::vector<SimDevice::RowBytes> reads, writes;
    for (std::uint32_t i = 0; i < full_pages(); ++i) reads.emplace_back(held.rows[i], prompt_.pages()[i].chain);
    for (std::uint64_t i = computed_ / size; i < (to + size - 1) / size; ++i) {
        require(held.own[i] != 0, "a lease is to write into a row that others read");
        const bool whole = (i + 1) * size <= to;
        writes.emplace_back(held.rows[i], whole ? prompt_.pages()[i].chain : 1);
    }
    fence_ = world_.device().run(std::move(reads), std::move(writes));
    computed_ = to;
}

void Session::publish(std::uint64_t tokens) {
    const Forest& forest = world_.driver().ledger().forest();
    const std::uint64_t size = world_.setup().page_size();
    std::vector<std::pair<Key, Row>> before;  // what is on the device stays where it is: the first writer wins
    for (const PageName& page : prompt_.pages()) {
        const PageId record = world_.page_of(page.key);
        if (record != kNoPage && forest.at(record).state[0] != Residency::none)
            before.emplace_back(page.key, forest.at(record).row[0]);
    }
    const std::uint32_t was = published_;
    const Fence ready = world_.device().has_run(fence_) && world_.dice().chance(0.5) ? 0 : fence_;
    published_ = world_.decide([&](Driver& driver, double now) { return driver.publish(now, id_, tokens, ready); });
    for (const auto& [key, row] : before) {
        const PageId record = world_.page_of(key);
        require(record != kNoPage && forest.at(record).row[0] == row, "a page was published over another");
    }
    world_.tell("lease %llu published %u pages", static_cast<unsigned long long>(id_), published_);
    require(published_ >= was, "published pages became fewer");
    require(write_ || published_ == was, "a lease published that may not write");
    require(published_ <= std::max<std::uint64_t>(was, tokens / size), "a page was published before it was computed");
    for (std::uint32_t i = 0; i < published_; ++i)
        require(world_.book().at(prompt_.pages()[i].key).in[0], "a published page cannot be found");
    if (write_ && published_ < tokens / size) {  // only another's load of the very page may stand in the way
        const PageId next = world_.page_of(prompt_.pages()[published_].key);
        require(next != kNoPage && forest.at(next).state[0] == Residency::incoming, "a page was not published");
    }
    world_.tally().published += published_ - was;
}

void Session::generate() {
    const std::uint64_t size = world_.setup().page_size();
    const std::uint32_t tokens = world_.dice().between(1, static_cast<std::uint32_t>(size + 1));
    if (prompt_.tokens().size() > std::uint64_t{world_.setup().most_pages} * size * 2) return;
    const std::size_t before = prompt_.tokens().size();
    prompt_.extend(world_.dice(), tokens);
    for (const PageName& page : prompt_.pages()) world_.book().note(page);
    world_.decide([&](Driver& driver, double) { return driver.append(id_, std::span(prompt_.tokens()).subspan(before)), 0; });
    if (world_.setup().guest()) return;
    const std::uint32_t more = world_.dice().below(2 * size + 1);
    const std::uint64_t pages = (more + size - 1) / size;
    const std::uint32_t room = world_.rows_to_be_had({});
    const bool grew = world_.decide([&](Driver& driver, double now) { return driver.grow(now, id_, more); });
    require(grew == (pages <= room), "growing was refused although there was room, or granted although there was none");
    if (grew) rows_ += pages;
    require(lease().rows.size() == rows_, "a lease has not the rows it asked for");
}

void Session::compute_all() {
    require(settled_, "only a settled lease computes");
    if (world_.setup().guest()) {
        compute_guest(hit_, static_cast<std::uint32_t>(prompt_.pages().size()));
        return publish_all();
    }
    compute(static_cast<std::uint32_t>(prompt_.tokens().size()));
    publish_all();
}

void Session::publish_all() {
    if (world_.setup().guest())
        save();
    else
        publish(computed_);
}

void Session::release() {
    if (over_) return;
    over_ = true;
    world_.tell("lease %llu released", static_cast<unsigned long long>(id_));
    for (const Loading& loading : loads_) world_.give_blocks(loading.blocks, {loading.ticket}, expected(loading));
    if (!blocks_.empty()) world_.give_blocks(blocks_, saves_, {});
    world_.decide([&](Driver& driver, double now) { return driver.release(now, id_, fence_), 0; });
    require(world_.driver().find(id_) == nullptr, "a released lease is still there");
    if (world_.dice().chance(0.3)) world_.decide([&](Driver& driver, double now) { return driver.release(now, id_, fence_), 0; });
}

// --- guest mode

void Session::act_guest() {
    Dice& dice = world_.dice();
    const double what = dice.real(0, 1);
    if (what < 0.3)
        load();
    else if (what < 0.5)
        compute_guest(dice.chance(0.7) ? hit_ : dice.below(prompt_.pages().size() + 1), dice.between(1, 3));
    else if (what < 0.8)
        save();
    else if (what < 0.9)
        generate();
    else
        release();
}

void Session::load() {
    if (hit_ == 0 || loads_.size() > 2) return;
    Loading loading{.ticket = 0, .first = world_.dice().below(hit_), .blocks = {}};
    if (!world_.take_blocks(world_.dice().between(1, hit_ - loading.first + 1), loading.blocks)) return;
    loading.ticket =
        world_.decide([&](Driver& driver, double now) { return driver.load(now, id_, loading.first, loading.blocks); });
    require(loading.ticket != 0, "pages of a hit were not loaded");
    loads_.push_back(std::move(loading));
}

void Session::check_loads() {
    std::erase_if(loads_, [&](Loading& loading) {
        if (world_.device().copying(loading.ticket) || world_.driver().copying(loading.ticket)) return false;
        world_.give_blocks(loading.blocks, {loading.ticket}, expected(loading));
        return true;
    });
}

// What its blocks hold when it ends well.
std::vector<SimDevice::RowBytes> Session::expected(const Loading& loading) const {
    std::vector<SimDevice::RowBytes> pages;
    for (std::uint32_t i = 0; i < loading.blocks.size() && loading.first + i < hit_; ++i)
        pages.emplace_back(loading.blocks[i], prompt_.pages()[loading.first + i].chain);
    return pages;
}

void Session::compute_guest(std::uint32_t first, std::uint32_t pages) {
    if (!blocks_.empty()) return;
    const auto all = static_cast<std::uint32_t>(prompt_.pages().size());
    first_block_ = first;
    pages = std::min(pages, all - std::min(all, first_block_));
    if (pages == 0 || !world_.take_blocks(pages, blocks_)) return;
    std::vector<SimDevice::RowBytes> writes;
    for (std::uint32_t i = 0; i < pages; ++i) writes.emplace_back(blocks_[i], prompt_.pages()[first_block_ + i].chain);
    fence_ = world_.device().run({}, std::move(writes));
}

void Session::save() {
    if (blocks_.empty() || saves_.size() > 2) return;
    const std::uint64_t ticket =
        world_.decide([&](Driver& driver, double now) { return driver.save(now, id_, first_block_, blocks_, fence_); });
    require(ticket == 0 || write_, "a lease saved that may not write");
    if (ticket != 0) {
        saves_.push_back(ticket);
        world_.tally().saved++;
    }
}

}  // namespace kvstrata::testing
