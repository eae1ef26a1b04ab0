// Under which name a server's certificate can be verified.
#pragma once

#include <string>

namespace kvasir::net {

// Of the first certificate in a PEM file: its first DNS name that is no pattern, else its first
// address; empty if it has neither, or cannot be read.
std::string certificate_name(const std::string& pem_file);

}  // namespace kvasir::net
