package seccomp

func int80() string { return "int 0x80 is an instruction of amd64" }

func ptracePid1() string { return "the registers to set are amd64's" }
