# The list of installed files, once: `cmake --install`, the Debian package (CPack), the image (deploy/docker/Dockerfile installs that
# package) and scripts/bundle.sh (component `program`) take it from here. tests/deploy/test_package.py compares the
# package with this list.
#
#   program    the program
#   service    unit, user, configuration
#   documents  documentation, API, dashboards, alerts
include(GNUInstallDirs)

install(TARGETS winnow RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT program)

install(FILES deploy/systemd/winnow.service DESTINATION lib/systemd/system COMPONENT service)
install(FILES deploy/systemd/winnow.sysusers DESTINATION lib/sysusers.d RENAME winnow.conf COMPONENT service)
# Absolute, whatever the prefix: the unit names it. A stage is made with DESTDIR.
install(FILES deploy/winnow.yaml DESTINATION /etc/winnow COMPONENT service)

set(WINNOW_DOC ${CMAKE_INSTALL_DATAROOTDIR}/doc/winnow)
install(FILES LICENSE DESTINATION ${WINNOW_DOC} RENAME copyright COMPONENT documents)
install(FILES README.md DESTINATION ${WINNOW_DOC} COMPONENT documents)
install(DIRECTORY docs/ DESTINATION ${WINNOW_DOC} COMPONENT documents FILES_MATCHING PATTERN "*.md" PATTERN results EXCLUDE)
install(DIRECTORY proto/winnow DESTINATION ${CMAKE_INSTALL_DATAROOTDIR}/winnow/proto COMPONENT documents FILES_MATCHING PATTERN "*.proto")
install(DIRECTORY deploy/monitoring/dashboards DESTINATION ${CMAKE_INSTALL_DATAROOTDIR}/winnow COMPONENT documents FILES_MATCHING PATTERN "*.json")
install(FILES deploy/monitoring/alerts.yaml DESTINATION ${CMAKE_INSTALL_DATAROOTDIR}/winnow COMPONENT documents)

# ---- the Debian package: cpack --config build/release/CPackConfig.cmake ----
set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME winnow)
set(CPACK_PACKAGE_VENDOR "winnow")
set(CPACK_PACKAGE_CONTACT "winnow maintainers <maintainers@winnow.invalid>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "inference server for long contexts")
set(CPACK_DEBIAN_PACKAGE_DESCRIPTION "Serves language models over gRPC and HTTP. Keeps the full KV cache where memory is cheap, and lets each\n step read only the entries that matter.")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_VERBATIM_VARIABLES ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION net)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)
# io_uring and O_DIRECT need no package; certificates are for clients that trust the system's authorities.
set(CPACK_DEBIAN_PACKAGE_DEPENDS "passwd")
set(CPACK_DEBIAN_PACKAGE_RECOMMENDS "ca-certificates")
set(CPACK_DEBIAN_PACKAGE_CONTROL_EXTRA ${CMAKE_SOURCE_DIR}/deploy/debian/postinst ${CMAKE_SOURCE_DIR}/deploy/debian/prerm
  ${CMAKE_SOURCE_DIR}/deploy/debian/conffiles)
if(WINNOW_CUDA)
  set(CPACK_DEBIAN_PACKAGE_NAME winnow-cuda)
  set(CPACK_DEBIAN_PACKAGE_CONFLICTS winnow)
  set(CPACK_DEBIAN_PACKAGE_PROVIDES winnow)
  set(CPACK_DEBIAN_PACKAGE_REPLACES winnow)
endif()
include(CPack)
