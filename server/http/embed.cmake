# cmake -DIN=status_page.html -DOUT=status_page.cc -P embed.cmake: kStatusPage with the file's bytes.
# Raw literals of at most 8,000 characters: some compilers take no more than 64 KiB in one. A hexadecimal reading
# would be safe for any bytes; the page is text, and stays legible in the program.
file(READ "${IN}" text)
if(text MATCHES "\\)~~~\"")
  message(FATAL_ERROR "${IN} holds )~~~\", which ends a literal")
endif()
string(LENGTH "${text}" length)
set(literals "")
set(begin 0)
while(begin LESS length)
  string(SUBSTRING "${text}" ${begin} 8000 piece)
  string(APPEND literals "R\"~~~(${piece})~~~\"\n")
  math(EXPR begin "${begin} + 8000")
endwhile()
file(WRITE "${OUT}" "#include \"server/http/status_page.h\"\n\nnamespace winnow::server {\n\n"
  "const std::string_view kStatusPage =\n${literals};\n\n}  // namespace winnow::server\n")
