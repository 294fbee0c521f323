// Names of pages. A key is a name, never a proof: whoever follows one compares the content.
#pragma once

#include "types.hpp"

namespace kvstrata {

// SHA-256 over, in this order: a domain tag, the namespace, the parent's key (the namespace itself for a first page), the number of
// tokens (u32) and the tokens (int32), the number of media items (u32) and the items (int32 offset, 32-byte digest); integers little
// endian. The only throw is std::runtime_error when OpenSSL has no SHA-256.
Key page_key(const Key& space, const Key& parent, const Content& content);

// For tables in memory only: fast, not stable across versions, and easy to collide on purpose.
std::uint64_t content_hash(const Content& content);

}  // namespace kvstrata
