// A certificate for a server whose owner has none: signed by an authority of the server's own, which
// is made once, so that those who were given it go on trusting when names and addresses change.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "base/error.h"

namespace kvasir::net {

struct OwnCertificate {
  std::string authority_file;    // to give to others: they verify the server by it
  std::string certificate_file;  // of the server
  std::string key_file;          // of the server, for its owner's eyes alone
};

// In `data_dir`, which must exist. `names` are host names and addresses under which the server is
// reached.
Result<OwnCertificate> make_own_certificate(const std::filesystem::path& data_dir,
                                            const std::vector<std::string>& names);
// This machine's host name (also under .local) and addresses, "localhost" among them.
std::vector<std::string> own_names();

}  // namespace kvasir::net
