# What `cmake --install` and CPack put where: three Debian packages, kvasir, kvasir-hub and
# kvasir-plugin. `./dev release` builds them (KVASIR_PACKAGES=ON), with manual pages and completions.

option(KVASIR_PACKAGES "Install manual pages and completions; needs scdoc, python3 and a kvasir that runs here" OFF)
# Where they lie when kvasir itself cannot run here, as when building for another machine.
set(KVASIR_COMMAND_DOCS "" CACHE PATH "Folder of manual pages and completions that another build has made")

install(TARGETS kvasir RUNTIME COMPONENT kvasir)
install(TARGETS kvasir-hub RUNTIME COMPONENT hub)
install(TARGETS ggml-kvasir LIBRARY DESTINATION lib/kvasir COMPONENT plugin)
install(CODE [[
  file(CREATE_LINK kvasir $ENV{DESTDIR}${CMAKE_INSTALL_PREFIX}/bin/linkcpp-expert-worker SYMBOLIC)]] COMPONENT kvasir)
install(FILES models/prompts.txt DESTINATION share/kvasir/models COMPONENT kvasir)
install(FILES models/tinymoe-en-Q4_K_M.gguf models/MODEL.md DESTINATION share/kvasir/models COMPONENT plugin)
foreach(component kvasir hub plugin)
  string(REPLACE "kvasir-kvasir" "kvasir" package kvasir-${component})
  install(FILES LICENSE RENAME copyright DESTINATION share/doc/${package} COMPONENT ${component})
endforeach()
# Laid out as here, so that the links between them lead somewhere.
install(FILES README.md SECURITY.md DESTINATION share/doc/kvasir COMPONENT kvasir)
install(DIRECTORY docs DESTINATION share/doc/kvasir COMPONENT kvasir
  FILES_MATCHING PATTERN "*.md" PATTERN "*.svg")
install(FILES models/MODEL.md DESTINATION share/doc/kvasir/models COMPONENT kvasir)
install(FILES packaging/grafana/kvasir.json DESTINATION share/doc/kvasir/packaging/grafana COMPONENT kvasir)
install(CODE [[
  file(CREATE_LINK copyright $ENV{DESTDIR}${CMAKE_INSTALL_PREFIX}/share/doc/kvasir/LICENSE SYMBOLIC)]] COMPONENT kvasir)

# Services. Their settings may hold tokens: for root's eyes alone.
install(FILES packaging/systemd/kvasir-join.service packaging/systemd/kvasir-worker.service
  DESTINATION lib/systemd/system COMPONENT kvasir)
install(FILES packaging/systemd/kvasir-hub.service DESTINATION lib/systemd/system COMPONENT hub)
set(_private PERMISSIONS OWNER_READ OWNER_WRITE)
install(FILES packaging/etc/join.env packaging/etc/worker.env DESTINATION /etc/kvasir ${_private} COMPONENT kvasir)
install(FILES packaging/etc/hub.env DESTINATION /etc/kvasir ${_private} COMPONENT hub)
install(DIRECTORY DESTINATION /var/lib/kvasir-models COMPONENT hub)

if(KVASIR_PACKAGES)
  set(_docs ${KVASIR_COMMAND_DOCS})
  if(NOT _docs)
    find_package(Python3 REQUIRED COMPONENTS Interpreter)
    find_program(SCDOC scdoc REQUIRED)
    set(_docs ${CMAKE_BINARY_DIR}/command-docs)
    add_custom_command(OUTPUT ${_docs}/man/kvasir.1
      COMMAND sh -c "$<TARGET_FILE:kvasir> describe | ${Python3_EXECUTABLE} -B ${CMAKE_SOURCE_DIR}/packaging/command_docs.py ${_docs}"
      DEPENDS kvasir packaging/command_docs.py docs/configuration.md VERBATIM)
    add_custom_target(kvasir_command_docs ALL DEPENDS ${_docs}/man/kvasir.1)
  endif()
  install(DIRECTORY ${_docs}/man/ DESTINATION share/man/man1 COMPONENT kvasir
    FILES_MATCHING PATTERN "*.1" PATTERN "kvasir-hub.1" EXCLUDE)
  install(FILES ${_docs}/man/kvasir-hub.1 DESTINATION share/man/man1 COMPONENT hub)
  install(FILES ${_docs}/man/kvasir-plugin.7 DESTINATION share/man/man7 COMPONENT plugin)
  install(FILES ${_docs}/completion/kvasir.bash RENAME kvasir DESTINATION share/bash-completion/completions COMPONENT kvasir)
  install(FILES ${_docs}/completion/kvasir-hub.bash RENAME kvasir-hub
    DESTINATION share/bash-completion/completions COMPONENT hub)
  install(FILES ${_docs}/completion/_kvasir DESTINATION share/zsh/vendor-completions COMPONENT kvasir)
  install(FILES ${_docs}/completion/_kvasir-hub DESTINATION share/zsh/vendor-completions COMPONENT hub)
  install(FILES ${_docs}/completion/kvasir.fish DESTINATION share/fish/vendor_completions.d COMPONENT kvasir)
  install(FILES ${_docs}/completion/kvasir-hub.fish DESTINATION share/fish/vendor_completions.d COMPONENT hub)
endif()

# --- CPack ------------------------------------------------------------------------------------

set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME kvasir)
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "")  # each package has its own
set(CPACK_PACKAGE_CONTACT "Kvasir <maintainers@kvasir.invalid>")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_PACKAGE_DIRECTORY ${CMAKE_BINARY_DIR}/packages)
set(CPACK_STRIP_FILES ON)
set(CPACK_COMPONENTS_ALL kvasir hub plugin)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_RELEASE 1)
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)
if(CMAKE_SYSTEM_PROCESSOR STREQUAL "aarch64")
  set(CPACK_DEBIAN_PACKAGE_ARCHITECTURE arm64)
endif()

# The kernels are ggml's, and "the same numbers" holds within one version of it only.
set(_ggml "libggml0 (>= 0.27), libggml0 (<< 0.28)")

set(CPACK_DEBIAN_KVASIR_PACKAGE_NAME kvasir)
set(CPACK_DEBIAN_KVASIR_PACKAGE_SECTION net)
set(CPACK_DEBIAN_KVASIR_PACKAGE_DEPENDS "${_ggml}, ca-certificates")
set(CPACK_DEBIAN_KVASIR_PACKAGE_SUGGESTS "kvasir-plugin, kvasir-hub")
set(CPACK_COMPONENT_KVASIR_DESCRIPTION "Mixture-of-Experts models over several machines, one expert at a time
Lends a machine's memory to a language model that fits on none of its
users' machines: a worker holds some experts of some layers, and answers
when the model's router picks one of them. Also cuts models into slices,
and judges whether workers compute what llama.cpp would.")

set(CPACK_DEBIAN_HUB_PACKAGE_NAME kvasir-hub)
set(CPACK_DEBIAN_HUB_PACKAGE_SECTION net)
set(CPACK_COMPONENT_HUB_DESCRIPTION "Hub for Kvasir: who holds which experts of a model
Hands out slices of Mixture-of-Experts models to the machines that lend
their memory, keeps account of which experts are scarce, and issues tokens.
It computes nothing itself.")

set(CPACK_DEBIAN_PLUGIN_PACKAGE_NAME kvasir-plugin)
set(CPACK_DEBIAN_PLUGIN_PACKAGE_SECTION net)
set(CPACK_DEBIAN_PLUGIN_PACKAGE_DEPENDS "${_ggml}")
set(CPACK_DEBIAN_PLUGIN_PACKAGE_RECOMMENDS "llama.cpp-tools, kvasir")
set(CPACK_COMPONENT_PLUGIN_DESCRIPTION "Kvasir's plugin for llama.cpp: experts computed by other machines
A ggml backend that stock llama.cpp loads by GGML_BACKEND_PATH. It takes the
routed experts of a Mixture-of-Experts model and has them computed by Kvasir
workers, with the text unchanged to the last bit. With a small model to try.")

# Shared libraries: found by dpkg-shlibdeps where the programs are native. Debian names them alike
# on every 64-bit machine, so that another architecture's packages take over what the native ones found.
set(KVASIR_SHLIBDEPS_FROM "" CACHE PATH "Folder with the native packages' *.depends files")
foreach(component KVASIR HUB PLUGIN)
  string(TOLOWER ${component} _lower)
  set(CPACK_DEBIAN_${component}_DESCRIPTION "${CPACK_COMPONENT_${component}_DESCRIPTION}")
  if(KVASIR_SHLIBDEPS_FROM)
    file(READ ${KVASIR_SHLIBDEPS_FROM}/${_lower}.depends CPACK_DEBIAN_${component}_PACKAGE_DEPENDS)
    string(STRIP "${CPACK_DEBIAN_${component}_PACKAGE_DEPENDS}" CPACK_DEBIAN_${component}_PACKAGE_DEPENDS)
  else()
    set(CPACK_DEBIAN_${component}_PACKAGE_SHLIBDEPS ON)
  endif()
  set(_control ${CMAKE_SOURCE_DIR}/packaging/deb/${_lower})
  if(IS_DIRECTORY ${_control})
    file(GLOB _scripts ${_control}/*)
    set(CPACK_DEBIAN_${component}_PACKAGE_CONTROL_EXTRA ${_scripts})
  endif()
endforeach()
include(CPack)
