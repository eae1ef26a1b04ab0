// kvasir-wan-proxy: a network between a backbone and its workers (network.h), as a program.
//
//   kvasir-wan-proxy --rtt-us 30000 --jitter-us 5000 [--mbit N] --to PORT [--to PORT …]
//
// Prints one line with a port of its own for each --to. Commands on standard input, one a line:
// "swallow I" (bytes of worker I vanish from now on, on new connections too, while they stay open).
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <iostream>
#include <string>

#include "network.h"

int main(int argc, char** argv) {
  CLI::App app("A network with delay, jitter, a bounded rate and swallowed bytes between loopback ports");
  std::int64_t rtt_us = 0, jitter_us = 0;
  double mbit = 0;
  std::vector<std::uint16_t> ports;
  app.add_option("--rtt-us", rtt_us, "round trip, microseconds")->check(CLI::Range(0, 10'000'000));
  app.add_option("--jitter-us", jitter_us, "the round trip varies by so much both ways, uniformly")->check(CLI::Range(0, 5'000'000));
  app.add_option("--mbit", mbit, "rate of each direction of a connection, Mbit/s; 0: no bound")->check(CLI::NonNegativeNumber);
  app.add_option("--to", ports, "a worker's port on this machine")->required();
  CLI11_PARSE(app, argc, argv);
  kvasir::bench::Network network;
  network.half = std::chrono::microseconds(rtt_us) / 2;
  network.jitter = std::chrono::microseconds(jitter_us);
  network.bytes_per_ns = mbit / 8000;
  kvasir::bench::Proxy proxy(network, ports);
  std::string line;
  for (std::uint16_t port : proxy.ports()) line += (line.empty() ? "" : " ") + std::to_string(port);
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);
  std::cin.tie(nullptr);
  while (proxy.run_until_readable(STDIN_FILENO)) {
    std::string command;
    std::size_t worker = 0;
    if (!(std::cin >> command >> worker)) return 0;
    if (command == "swallow") proxy.swallow(worker);
  }
  return 1;
}
