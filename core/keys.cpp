#include "keys.hpp"

#include <openssl/evp.h>

#include <algorithm>
#include <array>
#include <bit>
#include <memory>
#include <stdexcept>
#include <string_view>

#include "checksum.hpp"

namespace kvstrata {
namespace {

static_assert(std::endian::native == std::endian::little, "keys hash integers as they lie in memory");

constexpr std::string_view kTag{"kvstrata.page.1", 16};  // with its terminating zero

struct FreeDigest {
    void operator()(EVP_MD* digest) const { EVP_MD_free(digest); }
    void operator()(EVP_MD_CTX* context) const { EVP_MD_CTX_free(context); }
};

// One per thread: fetching the algorithm and making a context cost more than hashing a small page.
class Sha256 {
   public:
    Sha256() : digest_(EVP_MD_fetch(nullptr, "SHA256", nullptr)), context_(EVP_MD_CTX_new()) {}

    // Only the first start names the algorithm: it stays with the context, and naming it again costs as much as a small page.
    void start() {
        check(digest_ && context_ && EVP_DigestInit_ex2(context_.get(), started_ ? nullptr : digest_.get(), nullptr) == 1);
        started_ = true;
    }
    void add(const void* data, std::size_t bytes) { check(EVP_DigestUpdate(context_.get(), data, bytes) == 1); }
    Key finish() {
        Key key;
        unsigned size = 0;
        check(EVP_DigestFinal_ex(context_.get(), key.bytes.data(), &size) == 1 && size == key.bytes.size());
        return key;
    }

   private:
    static void check(bool fine) {
        if (!fine) throw std::runtime_error("OpenSSL cannot compute SHA-256; page keys need it");
    }

    std::unique_ptr<EVP_MD, FreeDigest> digest_;
    std::unique_ptr<EVP_MD_CTX, FreeDigest> context_;
    bool started_ = false;
};

// What a key is made of before the tokens, in one piece: each call of OpenSSL's costs as much as hashing several words.
struct KeyHead {
    std::array<char, kTag.size()> tag;
    Key space;
    Key parent;
    std::uint32_t tokens;
};
static_assert(sizeof(KeyHead) == kTag.size() + 32 + 32 + 4, "hashed as it lies in memory");

}  // namespace

Key page_key(const Key& space, const Key& parent, const Content& content) {
    thread_local Sha256 sha;
    const auto tokens = static_cast<std::uint32_t>(content.tokens.size());
    const auto media = static_cast<std::uint32_t>(content.media.size());
    KeyHead head{{}, space, parent, tokens};
    std::copy(kTag.begin(), kTag.end(), head.tag.begin());
    sha.start();
    sha.add(&head, sizeof head);
    sha.add(content.tokens.data(), content.tokens.size_bytes());
    sha.add(&media, sizeof media);
    if (media > 0) sha.add(content.media.data(), content.media.size_bytes());
    return sha.finish();
}

std::uint64_t content_hash(const Content& content) {
    const std::uint64_t hash = checksum(content.tokens.data(), content.tokens.size_bytes());
    return content.media.empty() ? hash : checksum(content.media.data(), content.media.size_bytes(), hash);
}

}  // namespace kvstrata
