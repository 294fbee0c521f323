#include "prompt.hpp"

#include "../keys.hpp"

namespace kvstrata::testing {
namespace {

std::uint64_t mix(std::uint64_t chain, std::uint64_t value) {
    chain = (chain ^ value) * 0xff51afd7ed558ccdull;
    chain = (chain ^ (chain >> 33)) * 0xc4ceb9fe1a85ec53ull;
    return chain ^ (chain >> 29);
}

}  // namespace

std::vector<std::byte> row_of(std::uint64_t chain, std::size_t bytes) {
    std::vector<std::byte> row(bytes);
    Dice stream(chain);
    for (std::size_t i = 0; i < bytes; ++i) row[i] = static_cast<std::byte>(stream.next());
    return row;
}

Prompt Prompt::draw(Dice& dice, std::uint32_t page_size, std::uint32_t most_pages, std::uint32_t spaces) {
    Prompt prompt;
    prompt.page_size_ = page_size;
    prompt.space_.bytes.fill(static_cast<std::uint8_t>(0x40 + dice.below(spaces)));
    if (dice.chance(0.15)) {  // two pictures that can stand in the same place, begin in one page and end in another
        Key digest;
        digest.bytes.fill(static_cast<std::uint8_t>(0x90 + dice.below(2)));
        prompt.media_.push_back({.offset = page_size / 2, .length = page_size + page_size / 2 + 1, .digest = digest});
    }
    const std::uint32_t pages = dice.between(0, most_pages);
    prompt.extend(dice, std::max(1u, pages * page_size + dice.below(page_size + 1)));
    return prompt;
}

Prompt Prompt::apart(std::uint32_t page_size, std::uint32_t tokens) {
    Prompt prompt;
    prompt.page_size_ = page_size;
    prompt.space_.bytes.fill(0x40);
    for (std::uint32_t i = 0; i < tokens; ++i) prompt.tokens_.push_back(static_cast<std::int32_t>(1'000'000 + i));
    prompt.name_pages();
    return prompt;
}

void Prompt::extend(Dice& dice, std::uint32_t tokens) {
    for (; tokens > 0; --tokens) {
        const auto offset = static_cast<std::int32_t>(tokens_.size() % page_size_);
        if (offset == 0) content_ = static_cast<std::int32_t>(dice.chance(0.6) ? 0 : dice.below(3));
        tokens_.push_back(content_ * 1000 + offset);
    }
    name_pages();
}

void Prompt::name_pages() {
    for (auto i = static_cast<std::int64_t>(pages_.size()); (i + 1) * page_size_ <= std::ssize(tokens_); ++i) {
        const std::int64_t begin = i * page_size_;
        std::vector<MediaItem> items;
        for (const MediaSpan& span : media_)
            if (span.offset < begin + page_size_ && span.offset + span.length > begin)
                items.push_back({static_cast<std::int32_t>(span.offset - begin), span.digest});
        PageName page;
        page.parent = i == 0 ? space_ : pages_.back().key;
        const Content content{{tokens_.data() + begin, page_size_}, items};
        page.key = page_key(space_, page.parent, content);
        page.chain = i == 0 ? mix(1, space_.prefix()) : pages_.back().chain;
        for (const std::int32_t token : content.tokens) page.chain = mix(page.chain, static_cast<std::uint64_t>(token));
        for (const MediaItem& item : items)
            page.chain = mix(mix(page.chain, 77 + static_cast<std::uint64_t>(item.offset)), item.digest.prefix());
        pages_.push_back(page);
    }
}

}  // namespace kvstrata::testing
