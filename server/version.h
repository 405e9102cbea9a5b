// The version that --version, GetModel and winnow_build_info report.
#ifndef WINNOW_SERVER_VERSION_H_
#define WINNOW_SERVER_VERSION_H_

namespace winnow::server {

inline constexpr char kVersion[] = WINNOW_VERSION;  // CMake's project version

}  // namespace winnow::server

#endif  // WINNOW_SERVER_VERSION_H_
