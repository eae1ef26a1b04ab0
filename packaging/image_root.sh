#!/bin/sh
# Turns a clean Debian tree into what the container image holds. Runs as root inside it.
set -eu
export DEBIAN_FRONTEND=noninteractive
apt-get -q install -y /release/packages/*_amd64.deb llama.cpp-tools
apt-get clean
rm -rf /var/lib/apt/lists/* /var/log/*
